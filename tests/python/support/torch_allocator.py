"""torch's own CUDACachingAllocator, run without a GPU over the dry driver.

The program at the end of this file plays a trace in a process of its own and writes
down what torch.cuda says; :func:`play_on_torch` starts it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowtide.phantom.traces import Operation, Trace
from support.dry_cuda import run_dry

CHECKPOINT = 100  # operations between two looks at everything


@dataclasses.dataclass(frozen=True)
class Played:
    """What torch.cuda showed; streams are those of the trace."""

    addresses: list[int | None]  # per operation; None: no allocation, or it failed
    errors: dict[int, str]  # of the allocations that failed
    reserved: list[int]
    allocated: list[int]
    stats: list[dict[str, int]]  # at each checkpoint
    segments: list[list[dict[str, Any]]]
    snapshot: dict[str, Any]  # torch.cuda.memory._snapshot() at the end


def play_on_torch(
    trace: Trace,
    folder: Path,
    *,
    conf: str = "",
    memory: int,
    toggles: Mapping[int, bool] | None = None,
) -> Played:
    """``trace`` on torch's allocator with PYTORCH_ALLOC_CONF=``conf`` on a device of
    ``memory`` bytes; before operation i, expandable segments become ``toggles[i]``."""
    trace.write(folder / "trace.jsonl")
    (folder / "toggles.json").write_text(json.dumps(toggles or {}))
    run_dry(
        [__file__, folder], memory=memory, events=trace.settings["events"], conf=conf
    )
    result = json.loads((folder / "played.json").read_text())
    result["errors"] = {int(index): text for index, text in result["errors"].items()}
    for segment in (s for look in result["segments"] for s in look):
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
    return Played(**result)


class _Player:
    def __init__(self, trace: Trace) -> None:
        # torch walks its blocks in the order of their streams' handles.
        numbers = sorted({o.stream for o in trace.operations if o.stream})
        self.streams = {0: torch.cuda.default_stream()}
        self.streams |= {number: torch.cuda.Stream() for number in numbers}
        self.tensors: dict[int | None, torch.Tensor] = {}

    def apply(self, operation: Operation) -> int | None:
        if operation.op == "allocate":
            with torch.cuda.stream(self.streams[operation.stream]):
                tensor = torch.empty(operation.bytes, dtype=torch.uint8, device="cuda")
            self.tensors[operation.id] = tensor
            return tensor.data_ptr()
        if operation.op == "free":
            self.tensors.pop(operation.id, None)
        elif operation.op == "record" and operation.id in self.tensors:
            self.tensors[operation.id].record_stream(self.streams[operation.stream])
        elif operation.op == "synchronize" and operation.stream is None:
            torch.cuda.synchronize()
        elif operation.op == "synchronize":
            self.streams[operation.stream].synchronize()
        elif operation.op == "empty_cache":
            torch.cuda.empty_cache()
        return None

    def snapshot(self) -> dict[str, Any]:
        """With the trace's streams, and no request of a block that is free: torch
        leaves there what it was last asked for."""
        snapshot = torch.cuda.memory._snapshot()
        number = {stream.cuda_stream: n for n, stream in self.streams.items()}
        for entry in (*snapshot["segments"], *snapshot["device_traces"][0]):
            entry["stream"] = number[entry["stream"]]
        for block in (b for s in snapshot["segments"] for b in s["blocks"]):
            if block["state"] == "inactive":
                block["requested_size"] = 0
        return snapshot


def _play(folder: Path) -> Played:
    trace = Trace.read(folder / "trace.jsonl")
    toggles = json.loads((folder / "toggles.json").read_text())
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    player = _Player(trace)
    played = Played([], {}, [], [], [], [], {})
    for index, operation in enumerate(trace.operations):
        if str(index) in toggles:
            torch.cuda.memory._set_allocator_settings(
                f"expandable_segments:{toggles[str(index)]}"
            )
        try:
            played.addresses.append(player.apply(operation))
        except torch.OutOfMemoryError as error:
            played.addresses.append(None)
            played.errors[index] = str(error)
        played.reserved.append(torch.cuda.memory_reserved())
        played.allocated.append(torch.cuda.memory_allocated())
        if index % CHECKPOINT == 0:
            played.stats.append(dict(torch.cuda.memory_stats()))
            played.segments.append(player.snapshot()["segments"])
    return dataclasses.replace(played, snapshot=player.snapshot())


def checkpoints(trace: Trace) -> range:
    return range(0, len(trace.operations), CHECKPOINT)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "played.json").write_text(json.dumps(dataclasses.asdict(_play(folder))))
