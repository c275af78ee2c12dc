"""On which streams gradients arrive when steps run on one stream, then on another.

    python gradient_streams_dry_run.py    prints {grads: [same, ...]}, by step: whether
                                          every gradient came on the step's own stream

Over the dry driver.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from support.cuda_steps import sharded, start, units_of

STEPS_ON_EACH = 3


def arrivals(grads: Literal["exact", "fused"]) -> list[bool]:
    models: list[nn.Module] = []
    step = sharded(grads=grads, prepare=models.append)
    seen: set[Any] = set()
    same = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(STEPS_ON_EACH):
                if not same:
                    watch(models[0], seen)
                seen.clear()
                step()
                same.append(seen == {stream})
    return same


def watch(model: nn.Module, seen: set[Any]) -> None:
    for unit in units_of(model):
        unit.unshard()
        for parameter in unit.parameters():
            if not hasattr(parameter, "device_mesh"):
                parameter.register_hook(
                    lambda gradient: seen.add(torch.cuda.current_stream())
                )
        unit.reshard()


def main() -> None:
    start()
    print(json.dumps({grads: arrivals(grads) for grads in ("exact", "fused")}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
