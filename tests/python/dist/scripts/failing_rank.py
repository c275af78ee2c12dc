"""Rank 1 raises in its second step, for which the others wait."""

import torch
import torch.distributed as dist
from torch import nn

import lowtide

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
for layer in model:
    lowtide.fully_shard(layer)
lowtide.fully_shard(model)
for step in range(3):
    if step == 1 and dist.get_rank() == 1:
        raise ValueError("token 7 of 5\nand a second line")
    model(torch.ones(1, 4)).sum().backward()
