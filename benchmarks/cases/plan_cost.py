"""What `lowtide plan` itself takes: time and memory of its processes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from case import Case, Row, rows_of
from launch import ENVIRONMENT, PROGRAMS
from llama_compiled import SECONDS

NAME = "plan_cost"
MODEL = str(Path(__file__).parents[2] / "examples" / "llama.py")
GIB = 1 << 30
RUNS = 3
EACH = 0.05  # seconds between two looks at the memory


@dataclass(frozen=True)
class Plan:
    what: str
    arguments: tuple[str, ...]
    aim_seconds: int
    aim_gib: float | None = None


PLANS = (
    Plan(
        "8B at world 8",
        ("--world", "8", MODEL, "--config", "8b"),
        *(10, 1.5),
    ),
    Plan(
        "70B at world 256",
        ("--world", "256", MODEL, "--config", "70b"),
        30,
    ),
    Plan(
        "compiled 8B at world 8",
        (
            *("--world", "8", "--", str(PROGRAMS / "llama_compiled.py")),
            *("--config", "8b", "--world", "8", "--loss", "chunked:32"),
        ),
        *(10, 1.5),
    ),
)


@dataclass(frozen=True)
class Cost:
    seconds: float
    compilation: float  # of these; 0 for what is not compiled
    cpu: float  # seconds
    gib: float  # of all its processes at one time

    @property
    def rest(self) -> float:
        return self.seconds - self.compilation


def measured(plan: Plan) -> Cost:
    """In a folder of its own, where no cache has anything."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        command = (*(sys.executable, "-m", "lowtide", "plan"), "--output", str(printed))
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*command, *plan.arguments],
            env=os.environ | ENVIRONMENT | {"TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        num_bytes = 0
        while (
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            is None
        ):
            num_bytes = max(num_bytes, memory_of(process.pid))
            time.sleep(EACH)
        seconds = time.perf_counter() - begin
        _, status, used = os.wait4(process.pid, 0)
        if status != 0:
            raise RuntimeError(f"plan_cost: expected {plan} to succeed, got {status}.")
        cpu = used.ru_utime + used.ru_stime
        compilation = compilation_in(printed.read_text())
        return Cost(seconds, compilation, cpu, num_bytes / GIB)


def compilation_in(printed: str) -> float:
    lines = [line for line in printed.splitlines() if line.startswith(SECONDS)]
    return sum(float(line.removeprefix(SECONDS)) for line in lines)


def memory_of(process: int) -> int:
    """Bytes of it and of all below it; what several share counts once."""
    return sum(map(proportional_set_size, descendants(process)))


def descendants(process: int) -> Iterator[int]:
    yield process
    for thread in Path(f"/proc/{process}/task").glob("*"):
        try:
            children = (thread / "children").read_text().split()
        except OSError:  # it has ended
            continue
        for child in children:
            yield from descendants(int(child))


def proportional_set_size(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = (line.split() for line in text.splitlines())
    return sum(int(words[1]) << 10 for words in sizes if words[0] == "Pss:")


def measure() -> list[Row]:
    return [
        row for plan in PLANS for row in rows(plan, [*map(measured, [plan] * RUNS)])
    ]


def rows(plan: Plan, costs: Sequence[Cost]) -> Iterator[Row]:
    row = rows_of(NAME)
    compiled = any(cost.compilation for cost in costs)
    rest = f"time, {plan.what}" + (", without compilation" if compiled else "")
    figures = [
        (rest, [cost.rest for cost in costs], "s", plan.aim_seconds),
        (f"CPU time, {plan.what}", [cost.cpu for cost in costs], "s", None),
        (f"memory, {plan.what}", [cost.gib for cost in costs], "GiB", plan.aim_gib),
    ]
    if compiled:
        seconds = [cost.compilation for cost in costs]
        figures.insert(1, (f"compilation, {plan.what}", seconds, "s", None))
    for quantity, values, unit, aim in figures:
        median, note = round(statistics.median(values), 2), ""
        if len(values) > 1:
            note = f"{len(values)} runs: {min(values):.2f} to {max(values):.2f}"
        yield row("lowtide", quantity, median, unit, "measured", note)
        if aim is not None:
            yield row("aim", quantity, aim, unit, "arithmetic")


CASE = Case(
    name=NAME,
    describe="Time and memory that `lowtide plan` itself takes.",
    how=f"""\
`python -m lowtide plan --world 8 examples/llama.py --config 8b`, the same with `256`
and `70b`, and `--world 8 -- programs/llama_compiled.py`, whose blocks torch compiles;
each {RUNS} times, from the start of the process to its end, with empty caches.
*compilation*: what torch's compiler says of itself, taken out of the time. *memory*:
the most of all processes at one time, shared pages once, looked at every
{EACH * 1000:.0f} ms. CPU time is that of the processes that `plan` waits for.
Shared machine: the least of the times is nearest to what it takes alone.""",
    run=measure,
)
