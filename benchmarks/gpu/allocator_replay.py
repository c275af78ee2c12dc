"""Records what torch's CUDA allocator did in training steps, asks the allocator model
the same, and compares event by event; then lowtide's ledger with the allocator.  As
JSON.

    allocator_replay.py --system lowtide --num-layers 2 [--trace run.jsonl]

Options are those of llama_memory.py. The history says what was asked for, and when
memory came from the device and went back; torch's profiler says what was allocated and
reserved after each call.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llama_memory import build as build_model
from llama_memory import parser, shard_by_unit
from stage import peaks, start
from torch import nn

from lowtide import memory_report
from lowtide.phantom.histories import trace_of_cuda
from lowtide.phantom.traces import Trace, replay

NUM_STEPS = 2
CUDA = 1  # among the kinds of device in a profile


@dataclass(frozen=True)
class Usage:
    """Of the device after an allocation or a free, bytes."""

    allocated: int
    reserved: int


def observed_in(profile: Mapping[str, Any]) -> list[Usage]:
    """From a Chrome trace of torch's profiler with ``profile_memory``."""
    events = [
        event
        for event in profile["traceEvents"]
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == CUDA
    ]
    events.sort(key=lambda event: event["ts"])
    return [
        Usage(event["args"]["Total Allocated"], event["args"]["Total Reserved"])
        for event in events
    ]


def compare(trace: Trace, observed: Sequence[Usage]) -> dict[str, Any]:
    """Counts of operations after which the model has something else; ``observed`` has
    the last ones of the trace that allocate or free."""
    result = replay(trace)
    asked = [
        index
        for index, operation in enumerate(trace.operations)
        if operation.op in ("allocate", "free") and not operation.fails
    ]
    if len(observed) > len(asked):
        raise ValueError(
            f"lowtide: allocator_replay: expected a history of at least "
            f"{len(observed)} calls, as the profiler saw, got {len(asked)}. Record it "
            "from before the first allocation."
        )
    last = asked[len(asked) - len(observed) :]
    wrong = {
        "allocated": [
            result.allocated[i] != usage.allocated
            for i, usage in zip(last, observed, strict=True)
        ],
        "reserved": [
            result.reserved[i] != usage.reserved
            for i, usage in zip(last, observed, strict=True)
        ],
    }
    return {
        "calls": len(asked),
        "calls observed": len(observed),
        "differences in the history": len(result.differences),
        "differences in allocated": sum(wrong["allocated"]),
        "differences in reserved": sum(wrong["reserved"]),
        "model": {
            "allocated": max(result.allocated, default=0),
            "reserved": max(result.reserved, default=0),
        },
    }


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


def train(args: Namespace) -> tuple[dict[str, Any], list[Usage], Trace]:
    """Figures after the steps, what the profiler saw of the last one, and the history
    up to there."""
    model: Any = shard_by_unit(build_model(args), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        shape = (1, args.sequence + 1)
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda")
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(NUM_STEPS - 1):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
        torch.cuda.synchronize()
    trace = trace_of_cuda(torch.cuda.memory._snapshot())
    figures: dict[str, Any] = {"cuda": peaks()}
    if args.system == "lowtide":
        figures["ledger"] = beside_ledger(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        profile.export_chrome_trace(str(path))
        return figures, observed_in(json.loads(path.read_text())), trace


def main() -> None:
    base = parser()
    base.add_argument("--trace", type=Path, help="where the history goes")
    base.set_defaults(system="lowtide", device="cuda")
    args = base.parse_args()
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=10**7, context=None)
    start("cuda", args.world, expandable=args.expandable)
    figures, observed, trace = train(args)
    if args.trace:
        trace.write(args.trace)
    print(json.dumps(figures | compare(trace, observed)))


if __name__ == "__main__":
    main()
