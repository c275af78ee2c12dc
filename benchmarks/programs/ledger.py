"""Training steps on a GPU: what torch's allocator has between steps, beside lowtide's
ledger.  As JSON.

    ledger.py --num-layers 2

Options are those of llama_memory.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from llama_memory import build as build_model
from llama_memory import parser, shard_by_unit
from stage import start
from torch import nn

from lowtide import memory_report

NUM_STEPS = 2


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """As the allocator hands them out."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(-(-size // 512) * 512 for size in storages.values())


def beside_ledger(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Between steps: what the allocator has, and how much of it has an owner."""
    report = memory_report(model)
    states = [
        getattr(value, "_local_tensor", value)
        for state in optimizer.state.values()
        for value in state.values()
    ]
    others = bytes_of([*states, *model.buffers()])
    return {
        "allocated between steps": torch.accelerator.memory_allocated(),
        "of it in the ledger": report.total_live,
        "of it optimizer and buffers": others,
        "ledger's peak": report.total_peak,
        "ledger's planned peak": sum(c.planned for c in report.categories.values()),
    }


def train(args: Namespace) -> dict[str, int]:
    model: Any = shard_by_unit(build_model(args), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(NUM_STEPS):
        shape = (1, args.sequence + 1)
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda")
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        del tokens
        optimizer.step()
        optimizer.zero_grad()
    return beside_ledger(model, optimizer)


def main() -> None:
    args = parser().parse_args()
    start(args.world, expandable=args.expandable)
    print(json.dumps(train(args)))


if __name__ == "__main__":
    main()
