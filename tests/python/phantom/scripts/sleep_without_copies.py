"""Weights and gradients are dropped, and weights loaded anew; prints what is held."""

import torch
import torch.distributed as dist
from torch import nn

import lowtide

dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
for unit in (*model, model):
    lowtide.fully_shard(unit)
optimizer = torch.optim.AdamW(model.parameters())


def step() -> None:
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    optimizer.step()


step()
model.reshard()
saved = {name: value.cpu() for name, value in model.state_dict().items()}
print("awake", torch.cuda.memory_allocated())
lowtide.sleep(model, optimizer, drop=["parameters", "gradients"])
print("asleep", torch.cuda.memory_allocated())
lowtide.wake(model, optimizer, refill=lambda: model.load_state_dict(saved))
print("refilled", torch.cuda.memory_allocated())
optimizer.zero_grad()
step()
