"""What tools/wheels.py runs where a wheel was just installed: three steps of training,
with `--compare` beside FSDP2's and bit for bit the same."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

import lowtide


def trained(fully_shard) -> list[torch.Tensor]:
    """The parameters after three steps, this rank's."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in "ab"])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(8, 32, device=model[0][0].weight.device) + dist.get_rank()
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local() for parameter in model.parameters()]


dist.init_process_group()
# A build without CUDA plans what others shard.
on_gpu = torch.accelerator.is_available()
ours = lowtide._C.build_info()["cuda"] or not on_gpu
# FSDP2 first: what gloo's threads keep of its last backward may end the process.
expected = trained(fsdp2) if "--compare" in sys.argv else None
parameters = trained(lowtide.fully_shard if ours else fsdp2)
if expected is not None:
    for mine, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    print(f"lowtide {lowtide.__version__}: rank {dist.get_rank()} has FSDP2's bits")
dist.destroy_process_group()
