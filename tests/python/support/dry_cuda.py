"""Programs on torch's CUDA build without a GPU: over the dry driver, which computes
nothing (csrc/phantom/driver), and nothing else changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lowtide.phantom.dry import launch


def run_dry(
    program: Sequence[str | Path],
    *,
    memory: int | None = None,
    events: str = "immediate",
    statuses: Sequence[int] = (0,),
) -> str:
    """What the Python program printed. ``memory``: bytes of a device; ``events``:
    "immediate" or "at_sync"; ``statuses``: how it may end."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH")}
    machine = launch.Machine(memory=memory, events=events)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, program)],
        env=launch.environment(machine, base)
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in statuses, done.stdout + done.stderr
    return done.stdout
