"""A trainer whose GPU others use in between, as engines of reinforcement learning do:
model, gradients and optimizer go to the host and come back.

``sleep_and_wake.py [forget] [fused]``: forgets to wake the model; ``grads="fused"``.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4))
)
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
settings = {"grads": "fused"} if "fused" in sys.argv else {}
for block in model:
    fully_shard(block, mp_policy=policy, offload_policy=None, **settings)
fully_shard(model, mp_policy=policy, offload_policy=None, **settings)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def say(what):
    print(what, torch.cuda.memory_allocated(), flush=True)


def move(device):
    model.to(device)
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(device)


def step():
    for _ in range(2):
        model(torch.randn(8, 512, device="cuda")).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


step()
for _ in range(2):
    say("trained")
    move("cpu")
    say("asleep")
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    if "forget" in sys.argv:
        step()
    move("cuda")
    say("awake")
    step()
    with torch.no_grad():
        model(torch.randn(8, 512, device="cuda"))
say("inferred")
dist.destroy_process_group()
