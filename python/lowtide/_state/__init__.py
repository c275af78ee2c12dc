"""Sequencing of the C++ engine: what happens when a module is wrapped, when its
first forward runs, and when its parameters are replaced."""
