"""Checkpointed regions, around the engine in csrc/activation."""
