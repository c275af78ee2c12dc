"""Training steps of the report's stack at its own size on CUDA: peak bytes and where
they are.  As JSON, by SYSTEM:NUM_LAYERS:ROWS:PREFETCH.

    residual_full_scale.py WORLD WIDTH "offload residual:32:65536:1" [...]

One rank runs; the others are not there (stage.start).
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
from stage import peaks, start
from torch import Tensor, nn

from lowtide import fully_shard

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
    system: str, num_layers: int, width: int, prefetch: int, sharded: bool
) -> Trained:
    with torch.device("meta"):
        model = Trained(system, num_layers, width, prefetch)
    if sharded:
        for block in model.stack.blocks:
            fully_shard(block)
        fully_shard(model)
    return model.to_empty(device="cuda")


def measure(
    world: int,
    width: int,
    system: str,
    num_layers: int,
    rows: int,
    prefetch: int,
) -> dict[str, Any]:
    accelerator = torch.accelerator
    model = build(system, num_layers, width, prefetch, world > 1)
    tokens = torch.zeros(rows, dtype=torch.long, device="cuda")
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
            **peaks(),
            # Parameters and gradients, when all are there.
            "state": accelerator.memory_allocated(),
        }
    return {**figures, "residual": rows * width * 4}


def main() -> None:
    world, width = map(int, sys.argv[1:3])
    start(world)
    figures = {}
    for spec in sys.argv[3:]:
        system, *numbers = spec.split(":")
        num_layers, rows, prefetch = map(int, numbers)
        figures[spec] = measure(world, width, system, num_layers, rows, prefetch)
        gc.collect()
        torch.accelerator.empty_cache()
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
