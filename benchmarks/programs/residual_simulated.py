"""Training steps of the report's stack at its own size on the simulated device: peak
bytes and where they are.  As a JSON list, one for each
SYSTEM:NUM_LAYERS:ROWS:PREFETCH.

    residual_simulated.py WORLD WIDTH "offload residual:32:65536:1" [...]

Meta mode: operators run without bytes, the allocator model answers as CUDA's would.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

# Host memory is as large as need be; set before lowtide reads it.
os.environ["LOWTIDE_PINNED_BYTES"] = str(1 << 40)

import torch
from residual_offload import Model
from torch import Tensor, nn

import lowtide.phantom
from lowtide import fully_shard, memory_report

STEPS = 3
NUM_TOKENS = 256


class Trained(nn.Module):
    """Tokens to the loss, so that nobody else holds the first block's argument."""

    def __init__(self, system: str, num_layers: int, width: int, prefetch: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.stack = Model(system, num_layers, width, prefetch)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.stack(self.embedding(tokens)).square().mean()


def build(
    system: str, num_layers: int, width: int, prefetch: int, world: int
) -> Trained:
    with torch.device("meta"):
        model = Trained(system, num_layers, width, prefetch)
    if world > 1:
        for block in model.stack.blocks:
            fully_shard(block)
        fully_shard(model)
    model.to_empty(device="phantom")
    return model


def measure(
    system: str, num_layers: int, rows: int, width: int, prefetch: int, world: int
) -> dict[str, Any]:
    accelerator = torch.accelerator
    model = build(system, num_layers, width, prefetch, world)
    tokens = torch.zeros(rows, dtype=torch.long, device="phantom")
    figures: dict[str, Any] = {}
    for _ in range(STEPS):
        model.zero_grad()
        before = accelerator.memory_allocated()
        accelerator.reset_peak_memory_stats()
        loss = model(tokens)
        held = accelerator.memory_allocated() - before
        host = model.stack.host_live()
        loss.backward()
        del loss
        figures = {
            "held": held,
            "host": host,
            "allocated": accelerator.max_memory_allocated(),
            "reserved": accelerator.max_memory_reserved(),
            # Parameters and gradients, when all are there.
            "state": accelerator.memory_allocated(),
        }
    report = memory_report(model).activations if "torch" not in system else None
    return {
        **figures,
        "residual": rows * width * 4,
        "exposed_wait": report.exposed_wait if report else None,
    }


def main() -> None:
    world, width = map(int, sys.argv[1:3])
    lowtide.phantom.install(mode="meta")
    lowtide.phantom.init_world(world)
    figures = []
    for spec in sys.argv[3:]:
        system, *numbers = spec.split(":")
        num_layers, rows, prefetch = map(int, numbers)
        figures.append(measure(system, num_layers, rows, width, prefetch, world))
        gc.collect()
        torch.accelerator.empty_cache()
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
