"""How gpu_check goes on: what is done stays, what is gone is done again, and what did
not finish waits for the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import building
import progress
import pytest
from processes import Processes
from progress import OtherMachine, Outcome, Progress


class Clock:
    """Goes on by what each step took."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeStep:
    name: str
    seconds: int = 10
    takes: int = 0
    error: BaseException | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    standing: bool = True
    clock: Clock = field(default_factory=Clock)
    runs: list[Processes] = field(default_factory=list)

    def run(self, processes: Processes) -> dict[str, Any]:
        self.runs.append(processes)
        self.clock.now += self.takes
        if self.error:
            raise self.error
        return self.figures

    def stands(self, figures: dict[str, Any]) -> bool:
        assert figures == self.figures
        return self.standing


HERE = {"GPU": "one", "sources": "a"}


@dataclass
class Run:
    """One call of the command; ``said`` has what it did with each step."""

    progress: Progress
    outcome: Outcome
    said: list[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.json"


@pytest.fixture
def go(path: Path) -> Callable[..., Run]:
    def run(steps: Sequence[FakeStep], budget: float = 1e9, **options: Any) -> Run:
        progress, said = Progress(path, HERE), []
        outcome = progress.run(steps, budget=budget, say=said.append, **options)
        return Run(progress, outcome, [line.splitlines()[0] for line in said])

    return run


def test_a_step_that_is_done_is_not_done_again(go: Callable[..., Run]) -> None:
    first, second = FakeStep("first"), FakeStep("second", error=RuntimeError("broke"))
    outcome = go([first, second]).outcome
    assert outcome.failed == {"second": "broke"} and not outcome.finished
    second.error, second.figures = None, {"of": "second"}
    again = go([first, second])
    assert again.outcome.finished
    assert (len(first.runs), len(second.runs)) == (1, 2)
    assert again.progress.figures("second") == {"of": "second"}
    again.progress.forget("first")
    again.progress.run([first, second], budget=1e9, say=lambda text: None)
    assert (len(first.runs), len(second.runs)) == (2, 2)


def test_what_does_not_stand_is_done_again(go: Callable[..., Run]) -> None:
    build, rest = FakeStep("build", figures={"tests": True}), FakeStep("rest")
    go([build, rest])
    build.standing = False
    assert go([build, rest]).said == ["build: about 10 s", "rest: done before"]
    build.standing = True
    assert go([build, rest]).said[0] == "build: done before"


def test_a_build_stands_by_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "BUILD", tmp_path / "build")
    monkeypatch.setattr(building, "PACKAGE", tmp_path / "package")
    made = [tmp_path / "build" / "build.ninja"] + [
        tmp_path / "package" / name
        for name in (
            "_C.cpython-312-x86_64-linux-gnu.so",
            "liblowtide_core.so",
            "liblowtide_cuda_dry.so",
        )
    ]
    for path in made:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    build = building.Build()
    assert build.stands({"arch": "9.0", "tests": True})
    assert not build.stands({"arch": "9.0", "tests": False})
    for path in made:
        path.unlink()
        assert not build.stands({"arch": "9.0", "tests": True})
        path.touch()


def test_what_needs_something_is_tried_again(
    go: Callable[..., Run], path: Path
) -> None:
    tests = FakeStep("tests", figures={"missing": "no GoogleTest"})
    run = go([tests])
    assert run.progress.figures("tests") == tests.figures  # for this run's report
    assert run.outcome.missing == ["tests"] and not run.outcome.finished
    stored = json.loads(path.read_text())
    assert stored["steps"] == {} and stored["begun"] == []
    tests.figures = {"passed": 3}
    run = go([tests])
    assert run.outcome.finished and run.progress.figures("tests") == {"passed": 3}


def test_no_step_is_begun_that_ends_after_the_budget(go: Callable[..., Run]) -> None:
    clock = Clock()
    a, b, c = (
        FakeStep(name, seconds, takes=seconds, clock=clock)
        for name, seconds in (("a", 100), ("b", 100), ("c", 10))
    )
    outcome = go([a, b, c], 150, clock=clock).outcome
    assert outcome.left == ["b", "c"]  # in order: c is not put before b
    # What came before counts too.
    outcome = go([a, b, c], 150, clock=clock, began=clock() - 51).outcome
    assert outcome.left == ["b", "c"]
    outcome = go([a, b, c], 150, clock=clock).outcome
    assert outcome.finished
    assert [len(step.runs) for step in (a, b, c)] == [1, 1, 1]


def test_a_step_is_ended_after_thrice_its_time_or_behind_the_budget(
    go: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "Processes", float)
    clock = Clock()
    a, b = (FakeStep(name, 50, takes=50, clock=clock) for name in "ab")
    go([a, b], 120, clock=clock)
    assert a.runs == [pytest.approx(1.04 * 120)]
    assert b.runs == [pytest.approx(1.04 * 120 - 50)]
    c = FakeStep("c", 30)
    go([c], float("inf"), clock=clock)
    assert c.runs == [90]


@pytest.mark.parametrize("error", [RuntimeError("killed"), SystemExit(143)])
def test_a_step_that_did_not_finish_waits_for_the_others(
    error: BaseException, go: Callable[..., Run], path: Path
) -> None:
    steps = [FakeStep("build"), FakeStep("a", error=error), FakeStep("b")]
    try:
        assert go(steps).outcome.failed == {"a": "killed"}
    except SystemExit:
        assert json.loads(path.read_text())["steps"].keys() == {"build"}
    assert json.loads(path.read_text())["begun"] == ["a"]
    steps.append(FakeStep("c"))
    steps[1].error = None
    order = [said.split(":")[0] for said in go(steps).said]
    assert order == ["build", "b", "c", "a"]
    assert json.loads(path.read_text())["begun"] == []


def test_a_build_that_did_not_finish_comes_first(go: Callable[..., Run]) -> None:
    steps = [FakeStep("build", error=RuntimeError("no nvcc")), FakeStep("speed")]
    outcome = go(steps).outcome
    assert outcome.failed == {"build": "no nvcc"}
    assert steps[1].runs == []  # nothing is measured without it
    steps[0].error = None
    assert go(steps).said == ["build: about 10 s", "speed: about 10 s"]


def test_every_step_that_was_run_is_reported(go: Callable[..., Run]) -> None:
    seen: list[tuple[int, list[str]]] = []
    steps = [FakeStep("a"), FakeStep("b", error=RuntimeError("broke")), FakeStep("c")]

    def after(outcome: Outcome) -> None:
        seen.append((sum(len(step.runs) for step in steps), [*outcome.failed]))

    go(steps, after=after)
    assert seen == [(1, []), (2, ["b"]), (3, ["b"])]


def test_steps_of_another_machine_or_source_are_not_mixed(
    go: Callable[..., Run], path: Path
) -> None:
    go([FakeStep("a")])
    with pytest.raises(OtherMachine) as caught:
        Progress(path, HERE | {"sources": "b"})
    assert str(caught.value) == (
        "lowtide: gpu_check: expected steps of {'GPU': 'one', 'sources': 'b'} in "
        f"{path}, got those of {HERE}. Pass another --out, or --fresh to begin anew."
    )
