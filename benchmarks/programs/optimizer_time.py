"""Thread CPU time of an optimizer step on five kinds of parameters, in turns, and how
often DTensor's dispatcher is asked, as JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from host_models import config, start
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from support.model import build
from support.systems import get_system

NUM_LAYERS = 16
WARM_UP = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
}
KINDS = ("plain", "units", "fsdp2", "lowtide", "local_parameters")


def optimizer_of(kind: str, variant: str) -> torch.optim.Optimizer:
    """Every parameter has a gradient; plain parameters have the shards' sizes, or of
    "units" those of all of a unit's."""
    model: Any = build(config(NUM_LAYERS))
    if kind in ("plain", "units"):
        shards = [
            [p.detach()[: max(1, len(p) // dist.get_world_size())] for p in unit]
            for unit in units_of(model)
        ]
        if kind == "units":
            shards = [[torch.cat([s.flatten() for s in unit])] for unit in shards]
        parameters = [torch.nn.Parameter(shard) for unit in shards for shard in unit]
    else:
        system = get_system("fsdp2" if kind == "fsdp2" else "lowtide")
        for module in (*model.layers, model):
            system.fully_shard(module)
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    if kind == "local_parameters":
        parameters = lowtide.local_parameters(model)
    optimizer = torch.optim.AdamW(parameters, **VARIANTS[variant])
    optimizer.model = model  # type: ignore[attr-defined]  keeps it alive
    return optimizer


def units_of(model: Any) -> list[list[torch.Tensor]]:
    blocks = [list(layer.parameters()) for layer in model.layers]
    inside = {id(p) for block in blocks for p in block}
    return [*blocks, [p for p in model.parameters() if id(p) not in inside]]


class DTensorCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def main() -> None:
    num_steps = int(sys.argv[1])
    start()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for variant in VARIANTS:
        optimizers = {kind: optimizer_of(kind, variant) for kind in KINDS}
        times: dict[str, list[int]] = {kind: [] for kind in KINDS}
        gc.disable()
        for step in range(WARM_UP + num_steps):
            for kind, optimizer in optimizers.items():
                begin = time.thread_time_ns()
                optimizer.step()
                if step >= WARM_UP:
                    times[kind].append(time.thread_time_ns() - begin)
        gc.enable()
        found[variant] = {}
        number = len(optimizers["plain"].param_groups[0]["params"])
        for kind, optimizer in optimizers.items():
            with DTensorCalls() as calls:
                optimizer.step()
            found[variant][kind] = {
                "us": statistics.median(times[kind]) / 1e3 / number,
                "DTensor calls": calls.count,
            }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
