"""Gathers that backward does again, around the engine in csrc/gather."""
