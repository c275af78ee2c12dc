"""What a dry process took, as JSON."""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from typing import Any

import torch

from . import calls, driver, values

_MOST_ENTRIES = 10**7


def record_history(file: str) -> None:
    """Writes torch's own memory history into ``file`` at the end; see
    https://pytorch.org/memory_viz."""
    memory = torch.cuda.memory

    def start() -> None:
        # Where memory is given back, an exception may be on its way.
        memory._record_memory_history(
            context="alloc", stacks="python", max_entries=_MOST_ENTRIES
        )
        atexit.register(memory._dump_snapshot, file)

    torch.cuda._lazy_call(start)


def write_at_exit(file: str) -> None:
    """Into ``file``, or after everything else that the program prints with ``-``."""

    def write() -> None:
        text = json.dumps(collect(), indent=1)
        if file == "-":
            print(text, flush=True)
        else:
            Path(file).write_text(text + "\n")

    sys.stdout.flush()
    atexit.register(write)


def collect() -> dict[str, Any]:
    """Bytes of each device, of pinned memory, counts, what NCCL was asked for, and what
    was assumed."""
    devices = []
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            statistics = torch.cuda.memory_stats(index)
            if not statistics.get("reserved_bytes.all.peak"):
                continue
            devices.append(
                {
                    "device": index,
                    "allocated": statistics.get("allocated_bytes.all.peak", 0),
                    "reserved": statistics.get("reserved_bytes.all.peak", 0),
                    "in_use": driver.peak_memory(index),
                    "retries": statistics.get("num_alloc_retries", 0),
                }
            )
    return {
        "gpu": torch.cuda.get_device_name(0),
        "devices": devices,
        "pinned": driver.peak_pinned(),
        "launches": driver.launches(),
        "host_waits": driver.host_waits(),
        **calls.collect(),
        "assumed": [
            {"what": what, "where": where, "times": times}
            for (what, where), times in sorted(values.notes.items())
        ],
        "missing": driver.missing(),
    }
