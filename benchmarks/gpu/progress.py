"""Steps that are done, on disk: a run that was cut off goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Figures = dict[str, Any]


class Step(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> int:
        """What it takes on an H100 machine, roughly."""

    def run(self) -> Figures: ...


class OtherMachine(Exception):
    """The stored steps are of another machine or another state of the sources."""


@dataclass
class Outcome:
    failed: dict[str, str] = field(default_factory=dict)  # step -> the error's end
    left: list[str] = field(default_factory=list)  # not begun, for want of time

    @property
    def finished(self) -> bool:
        return not self.failed and not self.left


class Progress:
    """``path`` holds {"of": ..., "steps": {name: {"seconds", "figures"}}}. ``of`` says
    what the figures belong to; raises OtherMachine if those stored belong elsewhere."""

    def __init__(self, path: Path, of: Figures) -> None:
        self._path = path
        self._stored: Figures = {"of": of, "steps": {}}
        if path.exists():
            self._stored = json.loads(path.read_text())
        if self._stored["of"] != of:
            raise OtherMachine(
                f"lowtide: gpu_check: expected steps of {of} in {path}, got those of "
                f"{self._stored['of']}. Pass another --out, or --fresh to begin anew."
            )

    def figures(self, name: str) -> Figures | None:
        step = self._stored["steps"].get(name)
        return step["figures"] if step else None

    def forget(self, name: str) -> None:
        self._stored["steps"].pop(name, None)

    def run(
        self,
        steps: Sequence[Step],
        *,
        budget: float,
        say: Callable[[str], object] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> Outcome:
        """Runs those that are not done, in order, and begins none that is likely to end
        after ``budget`` seconds; one that fails is run again by the next call. After a
        failed build nothing else is run."""
        outcome = Outcome()
        begin = clock()
        for step in steps:
            if self.figures(step.name) is not None:
                say(f"{step.name}: done before")
                continue
            if outcome.left or clock() - begin + step.seconds > budget:
                outcome.left.append(step.name)
                continue
            say(f"{step.name}: about {step.seconds} s")
            at = clock()
            try:
                figures = step.run()
            except Exception as error:
                outcome.failed[step.name] = str(error)
                say(f"{step.name}: failed\n{error}")
                if step.name == "build":
                    break
                continue
            self._keep(step.name, round(clock() - at, 1), figures)
        return outcome

    def _keep(self, name: str, seconds: float, figures: Figures) -> None:
        self._stored["steps"][name] = {"seconds": seconds, "figures": figures}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._stored, indent=1) + "\n")
        unfinished.replace(self._path)
