"""Trains a step, ends all groups, and prints how many of their threads are left when
what runs at the end of the interpreter has run."""

import atexit
import os
from pathlib import Path


def leave() -> None:
    threads = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    left = sum(name.startswith("pt_gloo") for name in threads)
    os.write(1, f"{left}\n".encode())  # whole: ranks share it
    os._exit(0)


atexit.register(leave)  # what is registered last runs first

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import lowtide  # noqa: E402

dist.init_process_group("gloo")
model = nn.Linear(4, 4)
lowtide.fully_shard(model)
model(torch.ones(2, 4)).sum().backward()
assert len(dist.distributed_c10d._world.pg_map) > 1
dist.destroy_process_group()
