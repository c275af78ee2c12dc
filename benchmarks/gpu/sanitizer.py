"""The kernels and a small training step under compute-sanitizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bars
from bars import with_bar
from building import BUILD
from case import Row
from launch import ENVIRONMENT, command
from prerequisites import of_toolkit
from processes import TAIL, Processes
from step import Figures

ABSENT = "compute-sanitizer is neither on PATH nor in the CUDA toolkit"
UNSUPPORTED = "Device not supported"
REFUSED = f"compute-sanitizer said of this GPU: {UNSUPPORTED}"
# torch asks the runtime for what may fail; that is no error of a kernel.
MEMCHECK = ("--tool", "memcheck", "--report-api-errors", "no")
CHECKERS = {"memcheck": MEMCHECK, "racecheck": ("--tool", "racecheck")}
STEP = (
    *("llama_memory.py", "--device", "cuda", "--config", "tiny"),
    *("--sequence", "64", "--loss", "vocabulary"),
)
NOTED = 600  # characters of what was found


class Unsupported(Exception):
    """The sanitizer does not know this device."""


@dataclass(frozen=True)
class Sanitizer:
    name: str = "sanitizer"
    what: str = "compute-sanitizer on the kernels' tests and on a small training step"
    seconds: int = 60

    def run(self, processes: Processes) -> Figures:
        sanitizer = of_toolkit("compute-sanitizer")
        if sanitizer is None:
            return {"missing": ABSENT}
        runs: dict[str, Sequence[str]] = {}
        tests = Path(BUILD, "ops_test")
        if tests.exists():
            for name, options in CHECKERS.items():
                kernels = (str(tests), "--gtest_filter=*cuda*")
                runs[f"{name}, kernels"] = (*options, *kernels)
        runs["memcheck, training step"] = (*MEMCHECK, *command(*STEP))
        figures: Figures = {"errors": {}, "found": {}}
        for what, arguments in runs.items():
            done = processes.run([sanitizer, *arguments], ENVIRONMENT)
            text = done.stdout + done.stderr
            try:
                errors = summary(text, done.returncode)
            except Unsupported:
                return {"missing": REFUSED}
            figures["errors"][what] = errors
            if errors:
                figures["found"][what] = text[-TAIL:]
        return figures

    def stands(self, figures: Figures) -> bool:
        return True

    def rows(self, figures: Figures) -> Iterator[Row]:
        for what, errors in figures["errors"].items():
            found = figures["found"].get(what, "").split("\n")
            note = " / ".join(line.strip() for line in found if line.strip())
            quantity = f"compute-sanitizer: errors, {what}"
            yield from with_bar(quantity, errors, bars.NONE, note=note[-NOTED:])


def summary(text: str, returncode: int) -> int:
    """memcheck counts errors, racecheck hazards; a program that failed by itself is not
    an answer."""
    if UNSUPPORTED in text:
        raise Unsupported
    pattern = r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard"
    found = [int(a or b) for a, b in re.findall(pattern, text)]
    if returncode != 0 and not any(found):
        raise RuntimeError(f"compute-sanitizer: exit {returncode}\n{text[-TAIL:]}")
    if not found:
        raise RuntimeError(f"compute-sanitizer: no summary\n{text[-TAIL:]}")
    return sum(found)
