"""What a dry process took, as JSON."""

from __future__ import annotations

import atexit
import functools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import calls, driver, values

_MOST_ENTRIES = 10**7
_PEAKS = {
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
}
_RETRIES = "num_alloc_retries"
# Of each device, before the program let torch count anew.
_before: defaultdict[int, Counter[str]] = defaultdict(Counter)


def keep_counts() -> None:
    """What the program has torch forget (``torch.cuda.reset_peak_memory_stats``) is in
    the report."""
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        _call_before(name, _keep_peaks)
    for name in (
        "_cuda_resetAccumulatedMemoryStats",
        "_accelerator_resetAccumulatedStats",
    ):
        _call_before(name, _keep_retries)


def _call_before(name: str, keep: Callable[[int], None]) -> None:
    reset = getattr(torch._C, name)

    @functools.wraps(reset)
    def kept(device: int) -> None:
        keep(device)
        reset(device)

    setattr(torch._C, name, kept)


def _keep_peaks(device: int) -> None:
    statistics = torch.cuda.memory_stats(device)
    _before[device] |= Counter(
        {name: statistics.get(peak, 0) for name, peak in _PEAKS.items()}
    )


def _keep_retries(device: int) -> None:
    _before[device]["retries"] += torch.cuda.memory_stats(device).get(_RETRIES, 0)


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
            _keep_peaks(index)
            _keep_retries(index)
            found = _before[index]
            if not found["reserved"]:
                continue
            devices.append(
                {
                    "device": index,
                    "allocated": found["allocated"],
                    "reserved": found["reserved"],
                    "in_use": driver.peak_memory(index),
                    "retries": found["retries"],
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
