"""Steps that are done, on disk: a run that was cut off goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processes import Processes
from step import Figures, Step

# A step may take so many times its estimate, and end so much behind the budget.
OF_ESTIMATE, OF_BUDGET = 3.0, 1.04


class OtherMachine(Exception):
    """The stored steps are of another machine or another state of the sources."""


@dataclass
class Outcome:
    failed: dict[str, str] = field(default_factory=dict)  # step -> the error
    left: list[str] = field(default_factory=list)  # not begun, for want of time
    missing: list[str] = field(default_factory=list)  # needs what is not there

    @property
    def finished(self) -> bool:
        return not (self.failed or self.left or self.missing)


class Progress:
    """``path`` holds {"of": ..., "steps": {name: {"seconds", "figures"}}, "begun":
    [names]}. ``of`` says what the figures belong to; raises OtherMachine if those
    stored belong elsewhere. *begun*: steps that did not finish, killed or failed."""

    def __init__(self, path: Path, of: Figures) -> None:
        self._path = path
        self._stored: Figures = {"of": of, "steps": {}, "begun": []}
        self._missing: dict[str, Figures] = {}  # of this run
        if path.exists():
            self._stored |= json.loads(path.read_text())
        if self._stored["of"] != of:
            raise OtherMachine(
                f"lowtide: gpu_check: expected steps of {of} in {path}, got those of "
                f"{self._stored['of']}. Pass another --out, or --fresh to begin anew."
            )

    def figures(self, name: str) -> Figures | None:
        step = self._stored["steps"].get(name)
        return step["figures"] if step else self._missing.get(name)

    def forget(self, name: str) -> None:
        self._stored["steps"].pop(name, None)

    def run(
        self,
        steps: Sequence[Step],
        *,
        budget: float,
        began: float | None = None,
        say: Callable[[str], object] = print,
        after: Callable[[Outcome], object] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Outcome:
        """Runs those that are not done: the build, the others in order, those that
        were begun before and did not finish. Begins none that is likely to end after
        ``budget`` seconds from ``began``, by default now; one that fails is run again
        by the next call. After a failed build nothing else is run. ``after`` follows
        each step that was run."""
        outcome = Outcome()
        began = clock() if began is None else began
        for step in self._ordered(steps):
            if self._stands(step):
                say(f"{step.name}: done before")
                continue
            elapsed = clock() - began
            if outcome.left or elapsed + step.seconds > budget:
                outcome.left.append(step.name)
                continue
            say(f"{step.name}: about {step.seconds} s")
            limit = min(OF_ESTIMATE * step.seconds, OF_BUDGET * budget - elapsed)
            self._run_one(step, Processes(limit), outcome, say, clock)
            after(outcome)
            if "build" in outcome.failed:
                break
        return outcome

    def _ordered(self, steps: Sequence[Step]) -> list[Step]:
        begun = self._stored["begun"]
        return sorted(steps, key=lambda s: s.name != "build" and s.name in begun)

    def _stands(self, step: Step) -> bool:
        stored = self._stored["steps"].get(step.name)
        return stored is not None and step.stands(stored["figures"])

    def _run_one(
        self,
        step: Step,
        processes: Processes,
        outcome: Outcome,
        say: Callable[[str], object],
        clock: Callable[[], float],
    ) -> None:
        self.forget(step.name)
        self._missing.pop(step.name, None)
        if step.name not in self._stored["begun"]:
            self._stored["begun"].append(step.name)
        self._write()
        at = clock()
        try:
            figures = step.run(processes)
        except Exception as error:
            outcome.failed[step.name] = str(error) or repr(error)
            say(f"{step.name}: failed\n{error}")
            return
        self._stored["begun"].remove(step.name)
        if "missing" in figures:
            self._missing[step.name] = figures
            outcome.missing.append(step.name)
        else:
            seconds = round(clock() - at, 1)
            self._stored["steps"][step.name] = {"seconds": seconds, "figures": figures}
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._stored, indent=1) + "\n")
        unfinished.replace(self._path)
