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


def command(program: str | Path, *arguments: object) -> list[str]:
    """``program``: of this folder, or a whole path."""
    return [sys.executable, str(PROGRAMS / program), *map(str, arguments)]


def run(
    program: str,
    *arguments: str,
    under: Sequence[str] = (),
    directory: Path | None = None,
    timeout: float,
) -> str:
    """What it printed; RuntimeError with the end of its errors when it fails. It sees
    no GPU."""
    done = subprocess.run(
        [*under, *command(program, *arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=directory,
        env=os.environ | ENVIRONMENT | NO_GPU,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout
