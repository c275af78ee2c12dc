"""benchmarks/gpu_check.sh without a GPU: what it says, how it goes on, what it finds in
figures made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import check
import prerequisites
import pytest
from progress import OtherMachine, Outcome, Progress
from scale import FULL
from steps import steps

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
GIB = 1 << 30


# -- what is missing ----------------------------------------------------------------


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_gpu_it_says_what_was_expected(tmp_path: Path) -> None:
    done = run_script("--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
    first, second = done.stderr.strip().splitlines()
    assert first.startswith("lowtide: gpu_check: expected one NVIDIA GPU, got none ")
    assert first.endswith("Run it on a machine with an H100 or H200.")
    assert second == prerequisites.ALL


def test_without_python_it_says_so() -> None:
    done = run_script(PYTHON="no-such-python")
    assert done.returncode == 2
    assert done.stderr == (
        "lowtide: gpu_check: expected Python >= 3.10, got no no-such-python. Set "
        "PYTHON to the interpreter that has torch 2.11.\n"
    )


def test_an_unknown_step_is_refused() -> None:
    done = run_script("--only", "speeds")
    assert done.returncode == 2
    assert "expected steps of build, tests, sanitizer, " in done.stderr
    assert done.stderr.endswith("got speeds. See --list.\n")


@dataclass
class FakeTorch:
    __version__: str = "2.11.0+cu130"
    cuda_version: str | None = "13.0"
    memory: int = 80 * GIB
    major: int = 9

    @property
    def version(self) -> Any:
        return type("version", (), {"cuda": self.cuda_version})

    @property
    def cuda(self) -> Any:
        device = {"name": "a GPU", "total_memory": self.memory}
        properties = type("p", (), device | {"major": self.major, "minor": 0})
        return type(
            "cuda",
            (),
            {
                "is_available": staticmethod(lambda: True),
                "get_device_properties": staticmethod(lambda index: properties),
            },
        )


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (
            FakeTorch("2.10.0+cu130"),
            "expected torch 2.11 built for CUDA 13, got torch 2.10.0+cu130 with CUDA "
            "13.0. Install torch==2.11.0 from the cu130 wheels, or set PYTHON.",
        ),
        (
            FakeTorch("2.11.0+cpu", None),
            "expected torch 2.11 built for CUDA 13, got torch 2.11.0+cpu with CUDA "
            "none. Install torch==2.11.0 from the cu130 wheels, or set PYTHON.",
        ),
        (
            FakeTorch(memory=40 * GIB),
            "expected a GPU of compute capability >= 9.0 with 75 GiB, got a GPU (9.0, "
            "40 GiB). Run it on a machine with an H100 or H200.",
        ),
        (
            FakeTorch(major=8),
            "expected a GPU of compute capability >= 9.0 with 75 GiB, got a GPU (8.0, "
            "80 GiB). Run it on a machine with an H100 or H200.",
        ),
    ],
)
def test_another_torch_or_gpu_is_refused(
    torch: FakeTorch, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(prerequisites.Missing) as caught:
        prerequisites.check()
    assert str(caught.value) == f"lowtide: gpu_check: {message}"


def test_a_tool_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(prerequisites.Missing, match=r"expected c\+\+ on PATH or"):
        prerequisites.tool("c++")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(prerequisites.Missing) as caught:
        prerequisites.nvcc_version()
    assert str(caught.value) == (
        f"lowtide: gpu_check: expected CUDA toolkit 13 (nvcc), got 12.8 ({nvcc}). "
        "Install it, and set CUDA_HOME if it is not in /usr/local/cuda."
    )


def test_a_run_is_planned_below_ten_minutes() -> None:
    planned = steps(FULL)
    assert sum(step.seconds for step in planned) <= 600
    assert max(step.seconds for step in planned) <= 300  # half a run, in two
    listed = run_script("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [step.name for step in planned]


# -- resuming -----------------------------------------------------------------------


@dataclass
class FakeStep:
    name: str
    seconds: int = 10
    error: str = ""
    runs: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        self.runs.append(self.name)
        if self.error:
            raise RuntimeError(self.error)
        return {"of": self.name}


class Clock:
    """Goes on by what each step was expected to take."""

    def __init__(self, *readings: float) -> None:
        self._readings = iter(readings)

    def __call__(self) -> float:
        return next(self._readings)


def quiet(text: str) -> None:
    pass


HERE = {"GPU": "one", "sources": "a"}


def test_a_step_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    first, second = FakeStep("first"), FakeStep("second", error="broke")
    outcome = Progress(path, HERE).run([first, second], budget=float("inf"), say=quiet)
    assert outcome.failed == {"second": "broke"} and not outcome.finished
    second.error = ""
    progress = Progress(path, HERE)
    outcome = progress.run([first, second], budget=float("inf"), say=quiet)
    assert outcome.finished
    assert (first.runs, second.runs) == (["first"], ["second", "second"])
    assert progress.figures("second") == {"of": "second"}
    progress.forget("first")
    progress.run([first, second], budget=float("inf"), say=quiet)
    assert (len(first.runs), len(second.runs)) == (2, 2)


def test_no_step_is_begun_that_ends_after_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    three = [FakeStep("a", 100), FakeStep("b", 100), FakeStep("c", 10)]
    # begin; then before each step, at its begin and its end
    clock = Clock(0, 0, 0, 90, 90)
    outcome = Progress(path, HERE).run(three, budget=150, say=quiet, clock=clock)
    assert outcome.left == ["b", "c"]  # in order: c is not put before b
    assert [step.runs for step in three] == [["a"], [], []]
    clock = Clock(0, 0, 0, 95, 95, 95, 99)
    outcome = Progress(path, HERE).run(three, budget=150, say=quiet, clock=clock)
    assert outcome.finished
    assert [step.runs for step in three] == [["a"], ["b"], ["c"]]


def test_an_interrupted_step_leaves_those_before_it(tmp_path: Path) -> None:
    class Interrupted(FakeStep):
        def run(self) -> dict[str, Any]:
            raise KeyboardInterrupt

    path = tmp_path / "steps.json"
    with pytest.raises(KeyboardInterrupt):
        Progress(path, HERE).run(
            [FakeStep("a"), Interrupted("b")], budget=1e9, say=quiet
        )
    assert Progress(path, HERE).figures("a") == {"of": "a"}


def test_after_a_failed_build_nothing_is_measured(tmp_path: Path) -> None:
    rest = FakeStep("speed")
    steps = [FakeStep("build", error="no nvcc"), rest]
    outcome = Progress(tmp_path / "s.json", HERE).run(steps, budget=1e9, say=quiet)
    assert outcome.failed == {"build": "no nvcc"} and rest.runs == []


def test_steps_of_another_machine_or_source_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    Progress(path, HERE).run([FakeStep("a")], budget=1e9, say=quiet)
    with pytest.raises(OtherMachine) as caught:
        Progress(path, HERE | {"sources": "b"})
    assert str(caught.value) == (
        "lowtide: gpu_check: expected steps of {'GPU': 'one', 'sources': 'b'} in "
        f"{path}, got those of {HERE}. Pass another --out, or --fresh to begin anew."
    )


def test_exit_status() -> None:
    assert check.status(Outcome(), []) == 0
    assert check.status(Outcome(), ["a bar"]) == 1
    assert check.status(Outcome(failed={"a": "b"}, left=["c"]), []) == 1
    assert check.status(Outcome(left=["c"]), []) == 3
