"""A measurement of gpu_check: which programs run, and what their figures say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case import Row
from launch import ENVIRONMENT, command
from processes import Processes
from scale import Scale
from step import Figures

GIB = 1 << 30
HERE = Path(__file__).resolve().parent
FLAGS: dict[str, tuple[str, ...]] = {"default": (), "expandable": ("--expandable",)}


@dataclass(frozen=True)
class Programs:
    """Runs programs of this folder and of ../programs; what each prints, read as
    JSON."""

    processes: Processes

    def __call__(self, name: str, *arguments: object) -> Any:
        here = HERE / name
        line = command(here if here.exists() else name, *arguments)
        printed = self.processes.checked(line, ENVIRONMENT)
        return json.loads(printed.splitlines()[-1])

    def dry(self, name: str, *arguments: object) -> Any:
        """Over the dry driver instead of the GPU."""
        # Only a step that comes behind the one that builds lowtide can import it.
        from lowtide.phantom.dry import launch

        machine = launch.Machine()
        line = launch.command(command(name, *arguments)[1:], machine, launch.Settings())
        environment = launch.environment(machine, os.environ | ENVIRONMENT)
        return json.loads(self.processes.checked(line, environment).splitlines()[-1])

    def together(
        self, calls: Sequence[Sequence[object]], *, at_once: int = 3
    ) -> list[Any]:
        """Programs that measure bytes do not disturb each other as long as the device
        holds those that run ``at_once``."""
        with ThreadPoolExecutor(max_workers=at_once) as threads:
            return list(threads.map(lambda call: self(*map(str, call)), calls))


@dataclass(frozen=True)
class Measurement:
    """A step: ``measure`` gives figures that JSON can keep, ``read`` their rows."""

    name: str
    what: str
    seconds: int
    scale: Scale
    measure: Callable[[Scale, Programs], Figures]
    read: Callable[[Figures], Iterator[Row]]

    def run(self, processes: Processes) -> Figures:
        return self.measure(self.scale, Programs(processes))

    def stands(self, figures: Figures) -> bool:
        return True

    def rows(self, figures: Figures) -> Iterator[Row]:
        return self.read(figures)


def spread(ratio: Figures) -> str:
    """Of what timing.ratio gives."""
    low, high = ratio["low"], ratio["high"]
    return f"{ratio['share']} of the rounds between {low:.3f} and {high:.3f}"
