"""Several ranks of a world, each a dry process of its own: which, how many at once, and
whether they meet.

Where all ranks of a world run, all at once, they have a store between them: objects
that they exchange, and gloo's groups, are real. Else each is alone, and what ranks
would send it is its own. NCCL's data never travels between processes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from . import ends, launch
from .call_logs import Log
from .comparison import Verdict
from .stores import Meeting

# The host's memory that a process takes: torch's libraries take 0.8 GiB, and a
# recording of a large model as much again.
_MEMORY_OF_PROCESS = 2 << 30
_MOST_ALONE = 2
_MOST_LINES = 40

Result = TypeVar("Result")


def parse(text: str, world: int) -> list[int]:
    """``0,1,7``, ``0-3`` or ``all``. Raises ValueError."""
    if text == "all":
        return list(range(world))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ends = int(first), int(last if dash else first)
        except ValueError:
            ends = -1, -1
        if not 0 <= ends[0] <= ends[1] < world:
            raise ValueError(
                f"lowtide: --ranks: expected ranks of the {world} of the world, as "
                f"0,1,7, 0-3 or all, got {text!r}. Pass --world too."
            )
        found.update(range(ends[0], ends[1] + 1))
    return sorted(found)


def run_each(
    ranks: Sequence[int], world: int, run: Callable[[int, int | None], Result]
) -> dict[int, Result]:
    """``run(rank, port)`` for each, in threads: ``port`` is that of a store between
    them, or None where each is alone. What it raises is raised once all have ended."""
    together = 1 < world == len(ranks) and _fitting() >= world
    at_once = world if together else max(1, min(_MOST_ALONE, _fitting()))
    meeting = Meeting() if together else None

    def run_one(rank: int) -> Result:
        try:
            return run(rank, meeting.port if meeting else None)
        finally:
            if meeting:
                meeting.ended(rank)

    with ThreadPoolExecutor(at_once) as pool:
        running = {rank: pool.submit(run_one, rank) for rank in ranks}
    return {rank: each.result() for rank, each in running.items()}


def _fitting() -> int:
    """Processes, into what the host has free."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // _MEMORY_OF_PROCESS
    return _MOST_ALONE


@dataclass(frozen=True)
class Outcome:
    """``report`` is what :mod:`.report` collects, if the process came to its end;
    ``output`` the end of what it printed, of the first rank nothing; ``complaint``:
    how it ended, if not by itself."""

    rank: int
    status: int
    report: dict[str, Any] | None
    output: str
    complaint: str = ""


def run_programs(
    program: Sequence[str],
    machine: launch.Machine,
    settings: launch.Settings,
    ranks: Sequence[int],
) -> tuple[list[Outcome], Verdict]:
    """The program as each of ``ranks``, and what comparing their calls of NCCL says.
    What the first one prints is printed."""
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, _ended(children):

        def run(rank: int, port: int | None) -> Outcome:
            of_rank = replace(machine, rank=rank)
            report, output, told = (
                Path(folder) / f"{rank}.{end}" for end in ("json", "txt", "told")
            )
            of_this = replace(settings, report=str(report), port=port, told=str(told))
            with output.open("wb") as file:
                where: Any = None if rank == ranks[0] else file
                child = launch.start(
                    *(program, of_rank, of_this),
                    stdin=subprocess.DEVNULL,
                    stdout=where,
                    stderr=where,
                )
                children.append(child)
                end = ends.wait(child, settings.limit, told)
            lines = output.read_text(errors="replace").splitlines(keepends=True)
            found = whole_report(report)
            complaint = end.complaint("phantom", program[0], settings.limit)
            printed = "".join(lines[-_MOST_LINES:])
            return Outcome(rank, end.exit_status, found, printed, complaint)

        outcomes = run_each(ranks, machine.world or 1, run)
    logs = [
        Log.of(rank, outcome.report, complete=outcome.status == 0)
        for rank, outcome in outcomes.items()
        if outcome.report is not None
    ]
    return list(outcomes.values()), Verdict.of(logs)


def whole_report(file: Path) -> dict[str, Any] | None:
    """None of a process that ended before, or while, it wrote one."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def _ended(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """None of them runs on where this process is interrupted."""
    try:
        yield
    except BaseException:
        for child in children:
            child.terminate()
        raise
