"""Writes what each of six steps made the host wait for the device, and whether ranks
compare what they did, to FOLDER/RANK.json.

    count_host_waits.py FOLDER
"""

import ctypes
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lowtide import fully_shard

waits = ctypes.CDLL(None).lowtide_dry_host_waits
waits.restype = ctypes.c_int64

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.ones(4, 32, device="cuda")
found = []
for _ in range(6):
    before = waits()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    found.append(waits() - before)
described = [g.group_desc for g in dist.distributed_c10d._world.pg_map]
result = {"waits": found, "compares": "lowtide_compare" in described}
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
