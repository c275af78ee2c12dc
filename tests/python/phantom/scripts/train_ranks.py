"""Trains on every rank of a mesh, and lets rank 1 go another way if it is asked to.

    train_ranks.py SYSTEM [WAY]

SYSTEM: fsdp2 or lowtide, on a mesh of two dimensions, or ddp. WAY: `order`, rank 1 runs
its two blocks the other way round; `equal`, so it does, and they are of one size;
`odd`, it leaves out an all-reduce when the number of its tokens is odd.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SYSTEM, WAY = sys.argv[1], (sys.argv[2:] or [""])[0]


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(32, hidden, bias=False)
        self.down = nn.Linear(hidden, 32, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(64), Block(64 if WAY == "equal" else 128)])
        self.head = nn.Linear(32, 8, bias=False)

    def forward(self, x, order):
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


def sharded(model):
    mesh = init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("data", "shard"))
    if SYSTEM == "lowtide":
        from lowtide import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = Model().cuda()
if SYSTEM == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    model = sharded(model)
optimizer = torch.optim.AdamW(model.parameters())
order = [1, 0] if rank == 1 and WAY in ("order", "equal") else [0, 1]
for step in range(3):
    tokens = torch.tensor(8 * step + rank, device="cuda")
    loss = model(torch.randn(4, 32, device="cuda"), order).square().mean()
    loss.backward()
    if WAY != "odd" or tokens.item() % 2 == 0:
        dist.all_reduce(tokens)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
