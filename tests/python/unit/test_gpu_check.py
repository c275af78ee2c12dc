"""benchmarks/gpu_check.sh without a GPU: what it says, what its figures belong to, how
it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars
import check
import prerequisites
import pytest
from case import Row
from progress import OF_BUDGET, Outcome, Progress
from scale import FULL
from steps import steps

import lowtide

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
    assert "expected steps of build, tests, memory-full, " in done.stderr
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
    monkeypatch.setattr(prerequisites.sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(prerequisites.Missing, match="expected cmake on PATH or"):
        prerequisites.tool("cmake")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(prerequisites.Missing, match=r"expected a C\+\+ compiler"):
        prerequisites.compiler()
    for name in ("g++", "c++", "other"):
        program = tmp_path / name
        program.touch(mode=0o755)
        assert prerequisites.compiler() == str(program)
        monkeypatch.setenv("CXX", "other")
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
    budget = check.parse([]).budget
    assert sum(step.seconds for step in planned) <= budget
    assert OF_BUDGET * budget < 600
    assert max(step.seconds for step in planned) <= 300  # half a run, in two
    assert planned[0].name == "build" and planned[-1].name == "sanitizer-step"
    assert len({step.what for step in planned}) == len(planned)  # each has a table
    listed = run_script("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [step.name for step in planned]


@pytest.mark.parametrize(("budget", "runs"), [(None, 1), (300, 2)])
def test_if_each_step_takes_its_estimate_nothing_is_left(
    budget: float | None, runs: int, tmp_path: Path
) -> None:
    now = 0.0
    until_begun = 25  # importing torch from a cold disk, asking for versions

    def clock() -> float:
        return now

    class Done(FakeStep):
        def run(self, processes: Any) -> dict[str, float]:
            nonlocal now
            now += self.seconds
            return {}

        def stands(self, figures: Any) -> bool:
            return True

    planned = [Done(step.name, seconds=step.seconds) for step in steps(FULL)]
    for _ in range(runs):
        began, now = now, now + until_begun
        progress = Progress(tmp_path / "steps.json", {})
        outcome = progress.run(
            planned,
            budget=budget or check.parse([]).budget,
            began=began,
            say=lambda text: None,
            clock=clock,
        )
    assert outcome.left == []


# -- what the stored steps belong to ------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("csrc/a.h", "python/lowtide/api.py", "benchmarks/b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("as it was")
    monkeypatch.setattr(check, "REPOSITORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("csrc/a.h", True),
        ("csrc/kernel.cu", True),
        ("python/lowtide/api.py", True),
        ("benchmarks/b.py", True),
        ("python/lowtide/include/spmd/rule.h", False),
        ("python/lowtide/_built_for.py", False),
        ("python/lowtide/_C.so", False),
    ],
)
def test_what_a_build_installs_is_no_source(
    name: str, changes: bool, checkout: Path
) -> None:
    before = check.sources()
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("written since")
    assert (check.sources() != before) == changes


def test_facts_name_lowtide_and_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert prerequisites.lowtide_version() == lowtide.__version__
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert prerequisites.driver_version() == ""
    program.write_text("#!/bin/sh\necho 580.65.06\n")
    program.chmod(0o755)
    assert prerequisites.driver_version() == "580.65.06"
    program.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert prerequisites.driver_version() == ""


# -- what it leaves -----------------------------------------------------------------


@dataclass
class FakeStep:
    name: str
    error: BaseException | None = None
    seconds: int = 1

    @property
    def what(self) -> str:
        return f"what {self.name} measures"

    def run(self, processes: Any) -> dict[str, float]:
        if self.error:
            raise self.error
        return {"bytes": 17.5}

    def rows(self, figures: dict[str, float]) -> Iterator[Row]:
        yield bars.row("lowtide", "bytes", figures["bytes"], "B", "measured")


HERE = {"GPU": "one", "torch": "2.11"}


def test_the_report_is_there_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prerequisites, "check", lambda any_gpu: HERE)
    planned = [
        FakeStep("first"),
        FakeStep("second", RuntimeError("second.py: exit 1")),
        FakeStep("third", SystemExit(143)),
    ]
    monkeypatch.setattr(check, "steps", lambda scale: planned)
    monkeypatch.setattr(check, "BEGAN", time.monotonic())  # not with these tests
    with pytest.raises(SystemExit):
        check.check(check.parse(["--out", str(tmp_path)]))
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert [(row["value"], row["note"]) for row in rows] == [
        (17.5, ""),
        (None, "failed: second.py: exit 1"),
        (None, "not run"),
    ]
    assert "| bytes | 17.5 | B |" in (tmp_path / "gpu_check.md").read_text()
    assert (tmp_path / "errors.txt").read_text() == "second: second.py: exit 1\n"


def test_what_is_wrong_is_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables before it are long."""
    monkeypatch.setattr(prerequisites, "check", lambda any_gpu: HERE)
    error = RuntimeError("first.py: exit 1\nTraceback\nOutOfMemoryError: 80 GiB")
    planned = [FakeStep("first", error), FakeStep("second", seconds=1000)]
    monkeypatch.setattr(check, "steps", lambda scale: planned)
    monkeypatch.setattr(check, "BEGAN", time.monotonic())
    assert check.check(check.parse(["--out", str(tmp_path)])) == check.UNFINISHED
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "failed: first: first.py: exit 1 ... OutOfMemoryError: 80 GiB",
        "left for the next run: second",
    ]


# -- how it ends --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "missed", "status"),
    [
        (Outcome(), [], 0),
        (Outcome(), ["a bar"], 1),
        (Outcome(failed={"speed": "broke"}), [], 1),
        (Outcome(missing=["tests"]), [], 1),
        (Outcome(left=["host"]), [], 3),
        (Outcome(left=["host"]), ["a bar"], 3),
        (Outcome(failed={"speed": "broke"}, left=["host"]), [], 3),
        (Outcome(failed={"build": "no nvcc"}, left=["host"]), [], 1),
    ],
)
def test_exit_status(outcome: Outcome, missed: list[str], status: int) -> None:
    assert check.status(outcome, missed) == status
