"""Runs the programs of this folder in a new, quiet interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent
REPOSITORY = PROGRAMS.parents[1]
# The package of this checkout, whatever else is installed.
PATHS = (REPOSITORY / "tests" / "python", REPOSITORY / "python", PROGRAMS)
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
}


def run(
    program: str,
    *arguments: str,
    under: Sequence[str] = (),
    directory: Path | None = None,
    gpu: bool = False,
    timeout: float,
) -> str:
    """What it printed; RuntimeError with the end of its errors when it fails. It sees
    no GPU unless ``gpu``."""
    command = [*under, sys.executable, str(PROGRAMS / program), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=directory,
        env=os.environ | ENVIRONMENT | ({} if gpu else NO_GPU),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout
