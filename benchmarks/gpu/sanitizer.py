"""The kernels and a small training step under compute-sanitizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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

HERE = Path(__file__).resolve().parent
ABSENT = "compute-sanitizer is neither on PATH nor in the CUDA toolkit"
UNSUPPORTED = "Device not supported"
REFUSED = f"compute-sanitizer said of this GPU: {UNSUPPORTED}"
# Each tensor is an allocation of its own: torch's allocator hands out parts of larger
# ones, within which memcheck sees no bounds.
UNCACHED = ENVIRONMENT | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# Python may be started by a script.
EVERYWHERE = ("--target-processes", "all")
# torch asks the runtime for what may fail; that is no error of a kernel.
MEMCHECK = (
    *("--tool", "memcheck", "--padding", "32"),
    *("--report-api-errors", "no"),
)
RACECHECK = ("--tool", "racecheck")
# Those of this library, not torch's and cuBLAS's, which take minutes.
OUR_KERNELS = ("--kernel-name", "kns=lowtide")
STEP = (
    *("llama_memory.py", "--config", "tiny"),
    *("--sequence", "64", "--loss", "vocabulary"),
)
FEW_ELEMENTS = 1 << 18
NO_TESTS = "[==========] Running 0 tests"
NOTED = 600  # characters of what was found


class Unsupported(Exception):
    """The sanitizer does not know this device."""


def kernels() -> Sequence[str]:
    """Their tests, or without GoogleTest each kernel once."""
    tests = Path(BUILD, "ops_test")
    if tests.exists():
        return str(tests), "--gtest_filter=*cuda*"
    return command(HERE / "kernels.py", FEW_ELEMENTS, 1)


def training_step() -> Sequence[str]:
    return command(*STEP)


@dataclass(frozen=True)
class Sanitizer:
    """``options``: of compute-sanitizer; ``program``: what runs under it."""

    name: str
    what: str
    seconds: int
    options: Sequence[str]
    program: Callable[[], Sequence[str]]

    def run(self, processes: Processes) -> Figures:
        sanitizer = of_toolkit("compute-sanitizer")
        if sanitizer is None:
            return {"missing": ABSENT}
        line = [sanitizer, *EVERYWHERE, *self.options, *self.program()]
        done = processes.run(line, UNCACHED)
        text = done.stdout + done.stderr
        try:
            errors = summary(text, done.returncode)
        except Unsupported:
            return {"missing": REFUSED}
        return {"errors": errors, "found": text[-TAIL:] if errors else ""}

    def stands(self, figures: Figures) -> bool:
        return True

    def rows(self, figures: Figures) -> Iterator[Row]:
        found = figures["found"].split("\n")
        note = " / ".join(line.strip() for line in found if line.strip())
        quantity = f"{self.what}: errors"
        yield from with_bar(quantity, figures["errors"], bars.NONE, note=note[-NOTED:])


def sanitizers() -> list[Sanitizer]:
    """A step each: what takes too long takes no other's figures along."""
    return [
        Sanitizer(
            "sanitizer-memcheck",
            "memcheck of the kernels",
            30,
            (*MEMCHECK, *OUR_KERNELS),
            kernels,
        ),
        Sanitizer(
            "sanitizer-racecheck",
            "racecheck of the kernels",
            25,
            (*RACECHECK, *OUR_KERNELS),
            kernels,
        ),
        Sanitizer(
            "sanitizer-step", "memcheck of a training step", 40, MEMCHECK, training_step
        ),
    ]


def summary(text: str, returncode: int) -> int:
    """memcheck counts errors, racecheck hazards; a program that failed by itself, or
    ran nothing, is not an answer."""
    if UNSUPPORTED in text:
        raise Unsupported
    pattern = r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard"
    found = [int(a or b) for a, b in re.findall(pattern, text)]
    if returncode != 0 and not any(found):
        raise RuntimeError(f"compute-sanitizer: exit {returncode}\n{text[-TAIL:]}")
    if not found:
        raise RuntimeError(f"compute-sanitizer: no summary\n{text[-TAIL:]}")
    if NO_TESTS in text:
        raise RuntimeError(f"compute-sanitizer: no test ran\n{text[-TAIL:]}")
    return sum(found)
