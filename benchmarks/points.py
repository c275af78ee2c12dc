"""Single runs of a program, a few at a time, kept on disk where asked to.

With LOWTIDE_BENCHMARK_POINTS=FILE every run's figures are appended to FILE, and a run
that is there is not repeated: a case that was cut off goes on, and after a change only
the lines that it concerns need to be deleted. Without it every run is new.
LOWTIDE_BENCHMARK_JOBS says how many run at a time, by default 4.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from launch import run

from lowtide.phantom.dry.launch import Machine

Figures = dict[str, Any]
Each = Callable[[Sequence[Sequence[str]]], list[Figures]]
Rows = TypeVar("Rows")
VARIABLE = "LOWTIDE_BENCHMARK_POINTS"
JOBS = "LOWTIDE_BENCHMARK_JOBS"


class Unknown(dict[str, Any]):
    """Figures that are not there yet: whatever is looked up is 1."""

    def __missing__(self, key: str) -> Any:
        return Unknown() if key in ("steady", "from_start", "moments") else 1


class Points:
    """Runs of ``program`` over the dry driver, which prints JSON. ``world``: of how
    many ranks it is the first; without one, its option ``--world`` says so."""

    def __init__(
        self,
        program: str,
        *,
        gpu: str = "h100",
        world: int | None = None,
        timeout: float,
    ) -> None:
        self._program, self._timeout = program, timeout
        self._gpu, self._world = gpu, world
        self._threads = ThreadPoolExecutor(int(os.environ.get(JOBS, 4)))
        self._lock = threading.Lock()
        path = os.environ.get(VARIABLE)
        self._file = Path(path) if path else None
        self._known: dict[tuple[str, ...], Figures] = {}
        if self._file is not None and self._file.exists():
            for line in self._file.read_text().splitlines():
                point = json.loads(line)
                if (point["program"], point.get("world")) == (program, world):
                    self._known[tuple(point["arguments"])] = point["figures"]

    def all_of(self, rows: Callable[[Each], Rows]) -> Rows:
        """``rows(each)``, whose runs are known beforehand by asking it twice: they do
        not wait for one another."""
        wanted: list[Sequence[str]] = []

        def collect(arguments: Sequence[Sequence[str]]) -> list[Figures]:
            wanted.extend(arguments)
            return [Unknown() for _ in arguments]

        rows(collect)
        self.each(wanted)
        return rows(self.each)

    def each(self, arguments: Sequence[Sequence[str]]) -> list[Figures]:
        """In their order; those that are equal run once."""
        wanted = dict.fromkeys(map(tuple, arguments))
        found = dict(zip(wanted, self._threads.map(self._one, wanted), strict=True))
        return [found[tuple(one)] for one in arguments]

    def _one(self, arguments: tuple[str, ...]) -> Figures:
        known = self._known.get(arguments)
        if known is not None:
            return known
        machine = self._machine(arguments)
        figures: Figures = json.loads(
            run(self._program, *arguments, machine=machine, timeout=self._timeout)
        )
        with self._lock:
            self._known[arguments] = figures
            if self._file is not None:
                point = {"program": self._program, "world": self._world}
                point |= {"arguments": arguments}
                with self._file.open("a") as file:
                    file.write(json.dumps(point | {"figures": figures}) + "\n")
        return figures

    def _machine(self, arguments: Sequence[str]) -> Machine:
        world = self._world or int(arguments[arguments.index("--world") + 1])
        return Machine(gpu=self._gpu, world=world)
