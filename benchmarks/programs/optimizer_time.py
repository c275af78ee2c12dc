"""Thread CPU time of an optimizer step on CUDA tensors of five kinds, in turns, and how
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
from stage import init_fake_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from support.model import ModelConfig, batch, build, loss_fn
from support.systems import get_system

NUM_LAYERS, WORLD = 16, 8
WARM_UP = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
}
# A norm's rows of one rank are as many elements as gradients are aligned to.
MODEL = ModelConfig(
    dim=512,
    num_layers=NUM_LAYERS,
    vocab=1024,
    num_heads=4,
    num_kv_heads=4,
    kv_dim=512,
    ffn=1024,
    seq=8,
    batch=1,
)
KINDS = ("plain", "units", "fsdp2", "lowtide", "local_parameters")


def optimizer_of(kind: str, variant: str) -> torch.optim.Optimizer:
    """Every parameter has a gradient; plain parameters have the shards' sizes, or of
    "units" those of all of a unit's."""
    model: Any = build(MODEL).cuda()
    if kind in ("plain", "units"):
        shards = [
            [p.detach()[: len(p) // WORLD] for p in unit] for unit in units_of(model)
        ]
        if kind == "units":
            shards = [[torch.cat([s.flatten() for s in unit])] for unit in shards]
        parameters = [torch.nn.Parameter(shard) for unit in shards for shard in unit]
        for p in parameters:
            p.grad = torch.zeros_like(p)
    else:
        system = get_system("fsdp2" if kind == "fsdp2" else "lowtide")
        for module in (*model.layers, model):
            system.fully_shard(module)
        inputs, targets = (each.cuda() for each in batch(MODEL, 0, 0, 0))
        loss_fn(model(inputs), targets).backward()
        parameters = list(model.parameters())
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
    torch.set_num_threads(1)
    init_fake_group(WORLD)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
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
