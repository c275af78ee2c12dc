"""Runs the programs of this folder in a new, quiet interpreter."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.phantom.dry.launch import Machine

PROGRAMS = Path(__file__).resolve().parent
REPOSITORY = PROGRAMS.parents[1]
# The package that this process would import, whatever else is installed.
(PACKAGE,) = importlib.util.find_spec("lowtide").submodule_search_locations
PATHS = (REPOSITORY / "tests" / "python", Path(PACKAGE).parent, PROGRAMS)
LEAVE = REPOSITORY / "tests/python/dist/scripts/run_and_leave.py"
NCCL = "LOWTIDE_NCCL"
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
    observed: bool = True,
    gpu: bool = False,
    variables: Mapping[str, str] | None = None,
    timeout: float,
) -> str:
    """What it printed; RuntimeError with the end of its errors when it fails. It sees
    no GPU, or with ``gpu`` that of this computer, or those of ``machine``, over the
    driver that computes nothing; not ``observed``: without what `lowtide phantom` does
    in the process beside that. ``variables``: of its environment. On a GPU it leaves
    without teardown: autograd's thread, letting go of the last backward, may want an
    interpreter that has ended, and aborts the process now and then (torch 2.15)."""
    base = os.environ | ENVIRONMENT
    environment = base | ({} if gpu else NO_GPU)
    first = (LEAVE, PROGRAMS / program) if gpu else (program,)
    line = command(*first, *arguments)
    if machine is not None:
        from lowtide.phantom.dry import launch

        if observed:
            line = launch.command(line[1:], machine, launch.Settings())
        environment = launch.environment(machine, base)
    environment |= variables or {}
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


def run_ranks(world: int, program: str, *arguments: object, timeout: float) -> str:
    """The program once a rank, all on the first GPU, which NCCL allows from 2.30 on;
    what rank 0 printed. ``LOWTIDE_NCCL`` names another library than torch's. When one
    fails the others are ended: RuntimeError with the end of its errors. Ranks leave
    without teardown, in which threads of gloo abort the process now and then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = os.environ | ENVIRONMENT
    base |= {
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    if nccl := os.environ.get(NCCL):
        base["LD_PRELOAD"] = nccl
    line = command(LEAVE, PROGRAMS / program, *arguments)
    with ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)
        ]
        said = stack.enter_context(tempfile.TemporaryFile("w+"))
        ranks = [
            subprocess.Popen(
                line,
                env=base | {"RANK": str(rank)},
                stdout=said if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank, errors in enumerate(files)
        ]
        try:
            failed = first_failure(ranks, timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed is not None:
            files[failed].seek(0)
            raise RuntimeError(
                f"{program}: rank {failed} of {world}: "
                f"exit {ranks[failed].returncode}\n{files[failed].read()[-3000:]}"
            )
        said.seek(0)
        return said.read()


def first_failure(
    processes: Sequence[subprocess.Popen[bytes]], timeout: float
) -> int | None:
    """The number of the first that fails, or of one that still runs after
    ``timeout`` seconds."""
    ends = time.monotonic() + timeout
    left = set(range(len(processes)))
    while left:
        for number in sorted(left):
            status = processes[number].poll()
            if status is not None:
                left.discard(number)
            if status or (status is None and time.monotonic() > ends):
                return number
        time.sleep(0.05)
    return None
