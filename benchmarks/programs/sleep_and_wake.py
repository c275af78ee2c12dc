"""What a model lends of a GPU while it sleeps, and what that costs, as JSON: bytes that
are reserved and allocated awake and asleep, page-locked bytes, seconds of each sleep
and wake, and whether a run that slept in every step has the bits of one that did not.

    sleep_and_wake.py WORLD WIDTH NUM_LAYERS STEPS

WORLD 1: one rank on NCCL; more: rank 0 of as many, over the dry driver, whose bits and
seconds mean nothing. It runs with and without expandable segments
(PYTORCH_CUDA_ALLOC_CONF).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from stage import start, start_real_ranks
from torch import nn

import lowtide
from lowtide.sleeping import host_pool

TOKENS = 256


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def build(width: int, num_layers: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    policy = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("cuda"):
        model: Any = nn.Sequential(*(Block(width) for _ in range(num_layers)))
    for block in model:
        lowtide.fully_shard(block, mp_policy=policy)
    lowtide.fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def held() -> dict[str, int]:
    return {
        "reserved": torch.cuda.memory_reserved(),
        "allocated": torch.cuda.memory_allocated(),
        "page-locked": host_pool(torch.device("cuda", 0)).figures()["pinned_bytes"],
    }


def train(
    width: int, num_layers: int, steps: int, nap: Callable[[Any, Any], None]
) -> str:
    """A digest of the parameters. Naps between two microbatches, before and behind the
    optimizer's step."""
    model, optimizer = build(width, num_layers)
    for step in range(steps):
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            torch.manual_seed(2 * step + sync)
            x = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)
            model(x).float().square().mean().backward()
            nap(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        nap(model, optimizer)
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().to_local().cpu().numpy().tobytes())
    return digest.hexdigest()


def main(world: int, width: int, num_layers: int, steps: int) -> dict[str, Any]:
    if world > 1:
        start(world)
    else:
        start_real_ranks()
    naps: list[dict[str, Any]] = []

    def nap(model: Any, optimizer: torch.optim.Optimizer) -> None:
        torch.cuda.synchronize()
        found: dict[str, Any] = {"awake": held()}
        begin = time.perf_counter()
        lowtide.sleep(model, optimizer)
        found["seconds to sleep"] = time.perf_counter() - begin
        found["asleep"] = held()
        begin = time.perf_counter()
        lowtide.wake(model, optimizer)
        torch.cuda.synchronize()
        found["seconds to wake"] = time.perf_counter() - begin
        found["woken"] = held()
        naps.append(found)

    slept = train(width, num_layers, steps, nap)
    woke = train(width, num_layers, steps, lambda model, optimizer: None)
    dist.destroy_process_group()
    return {"same bits": slept == woke, "naps": naps}


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
