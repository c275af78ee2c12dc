"""What `lowtide plan` itself takes: time and memory of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from case import Case, Row, rows_of

NAME = "plan_cost"
MODEL = Path(__file__).parents[2] / "examples" / "llama.py"
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    config: str
    world: int
    aim_seconds: int
    aim_gib: float | None  # resident


PLANS = (Plan("8b", 8, 30, 4.0), Plan("70b", 256, 180, None))


def command(plan: Plan) -> list[str]:
    of_model = [str(MODEL), "--config", plan.config, "--world", str(plan.world)]
    return [sys.executable, "-m", "lowtide", "plan", *of_model, "--rank", "0"]


def run(arguments: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and resident GiB at most."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status != 0:
        raise RuntimeError(f"plan_cost: expected {arguments} to succeed, got {status}.")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / GIB


def measure() -> list[Row]:
    row = rows_of(NAME)
    result = []
    for plan in PLANS:
        seconds, cpu, resident = run(command(plan))
        what = f"{plan.config.upper()} at world {plan.world}"
        figures = {
            f"time, {what}": (seconds, plan.aim_seconds, "s"),
            f"CPU time, {what}": (cpu, None, "s"),
            f"resident memory, {what}": (resident, plan.aim_gib, "GiB"),
        }
        for quantity, (value, aim, unit) in figures.items():
            result.append(row("lowtide", quantity, round(value, 2), unit, "measured"))
            if aim is not None:
                result.append(row("aim", quantity, aim, unit, "arithmetic"))
    return result


CASE = Case(
    name=NAME,
    describe="Time and memory that `lowtide plan` itself takes.",
    how="""\
`python -m lowtide plan examples/llama.py --config 8b --world 8 --rank 0`, and the same
with `70b` and `256`, each once, from the start of the process to its end; resident
memory is the most the process had. Shared machine: take the CPU time for the figure
where the two differ.""",
    run=measure,
)
