"""torchao's float8 recipes with the products of an H100.

train_float8.py SYSTEM RECIPE

SYSTEM: fsdp2 or lowtide. RECIPE: tensorwise, gathered in float8 with scales in advance,
or rowwise.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

SYSTEM, RECIPE = sys.argv[1:]
DIM, HIDDEN, BLOCKS = 1024, 4096, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
if SYSTEM == "lowtide":
    from lowtide import fully_shard
else:
    from torch.distributed.fsdp import fully_shard
with torch.device("meta"):
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
if RECIPE == "tensorwise":
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
else:
    config = Float8LinearConfig.from_recipe_name(RECIPE)
convert_to_float8_training(model, config=config)
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for module in (*model, model):
    fully_shard(module, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in range(3):
    model(torch.zeros(256, DIM, device="cuda")).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if RECIPE == "tensorwise":
        precompute_float8_dynamic_scale_for_fsdp(model)
dist.destroy_process_group()
