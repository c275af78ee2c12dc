"""Programs on torch's CUDA build without a GPU: over the dry driver, which computes
nothing (csrc/phantom/driver)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lowtide

DRIVER = Path(lowtide.__file__).with_name("liblowtide_cuda_dry.so")


def run_dry(
    program: Sequence[str | Path],
    *,
    memory: int | None = None,
    events: str = "immediate",
    conf: str = "",
    gpu: str = "h100",
    devices: int = 1,
    statuses: Sequence[int] = (0,),
) -> str:
    """What the Python program printed. ``memory``: bytes of a device; ``events``:
    "immediate" or "at_sync"; ``conf``: PYTORCH_ALLOC_CONF; ``statuses``: how it may
    end."""
    foreign = ("CUDA", "PYTORCH", "LOWTIDE_DRY")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment |= {
        "LD_PRELOAD": str(DRIVER),
        "LOWTIDE_DRY_DEVICES": str(devices),
        "LOWTIDE_DRY_EVENTS": events,
        "LOWTIDE_DRY_GPU": gpu,
        "LOWTIDE_DRY_MEMORY": "" if memory is None else str(memory),
        "PYTORCH_ALLOC_CONF": conf,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, program)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode in statuses, done.stdout + done.stderr
    return done.stdout
