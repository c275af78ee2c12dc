"""Runs the programs of this folder in a new, quiet interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.phantom.dry.launch import Machine

PROGRAMS = Path(__file__).resolve().parent
REPOSITORY = PROGRAMS.parents[1]
# The package that this process would import, whatever else is installed.
(PACKAGE,) = importlib.util.find_spec("lowtide").submodule_search_locations
PATHS = (REPOSITORY / "tests" / "python", Path(PACKAGE).parent, PROGRAMS)
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
    machine: Machine | None = None,
    gpu: bool = False,
    timeout: float,
) -> str:
    """What it printed; RuntimeError with the end of its errors when it fails. It sees
    no GPU, or with ``gpu`` that of this computer, or those of ``machine``, over the
    driver that computes nothing."""
    base = os.environ | ENVIRONMENT
    line, environment = command(program, *arguments), base | ({} if gpu else NO_GPU)
    if machine is not None:
        from lowtide.phantom.dry import launch

        line = launch.command(line[1:], machine, launch.Settings())
        environment = launch.environment(machine, base)
    done = subprocess.run(
        [*under, *line],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=directory,
        env=environment,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout
