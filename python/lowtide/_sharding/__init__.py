"""Sharding, around the engine in csrc/shard: what happens when a module is wrapped,
when its first forward runs, and when its parameters are replaced."""
