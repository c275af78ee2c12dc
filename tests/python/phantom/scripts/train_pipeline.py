"""torch's pipeline of a stage a rank; each learns the shapes of what it gets from the
one before it, as objects."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
layer = nn.Linear(64, 64).to(device)
stage = PipelineStage(layer, rank, world, device)
schedule = Schedule1F1B(
    stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).norm()
)
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(2):
    batch = torch.randn(8, 64, device=device)
    if rank == 0:
        schedule.step(batch)
    elif rank == world - 1:
        schedule.step(target=batch)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
