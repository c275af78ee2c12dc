"""What a process holds, sampled between steps, and whether it grows."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from lowtide._activation.regions import transfers
from lowtide._base.memory import ledger

# What 1,000 steps may add. A descriptor, thread or buffer that stays is one too many;
# resident memory moves by what is touched late, by fragments, and by some ten kilobytes
# that torch keeps of every world.
BOUNDS = {
    "resident": 2 << 20,
    "descriptors": 0.5,
    "threads": 0.5,
    "pinned": 512.0,
    "ledger": 512.0,
}
Sample = dict[str, int]


def sample() -> Sample:
    """Bytes of ``resident``, ``pinned`` and ``ledger`` (the device's and the host's),
    numbers of ``descriptors`` and ``threads``. What the heap keeps without use goes
    back to the system first: glibc's arenas grow by how threads happen to meet."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    device = torch.device("cpu")
    pool = transfers(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "pinned": pool.pool_figures()["pinned_bytes"],
        "ledger": ledger(device).total_live + pool.host_ledger.total_live,
    }


def slope(values: Sequence[float]) -> float:
    """From one value to the next: the median over all pairs (Theil 1950, Sen 1968),
    which a third of outliers does not move."""
    return statistics.median(
        (later - earlier) / (j - i)
        for (i, earlier), (j, later) in itertools.combinations(enumerate(values), 2)
    )


def growth(samples: Sequence[Sample], quantity: str, steps: int) -> float:
    """What 1,000 steps add, of which there are ``steps`` between two samples, at the
    slope of the second half of them: caches fill in the first."""
    settled = [float(one[quantity]) for one in samples[len(samples) // 2 :]]
    return slope(settled) * 1000 / steps


def growing(samples: Sequence[Sample], steps: int) -> dict[str, float]:
    """Of what grows more than the bounds."""
    found = {quantity: growth(samples, quantity, steps) for quantity in BOUNDS}
    return {name: value for name, value in found.items() if value > BOUNDS[name]}
