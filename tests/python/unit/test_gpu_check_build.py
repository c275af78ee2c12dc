"""The build, tests and sanitizer of gpu_check without a GPU: what they ask of the
tools, and what they read of their output."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import bars
import building
import check
import pytest
import sanitizer
from processes import Processes
from progress import Progress

# -- configuring ----------------------------------------------------------------------


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where GoogleTest is not found CMake would fetch it, or wait for a network."""
    monkeypatch.setattr(building, "BUILD", tmp_path)
    monkeypatch.delenv(building.GOOGLETEST, raising=False)
    command = building.configure(True, "9.0")
    here = ("-DLOWTIDE_CUDA=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON")
    done = Processes(120).run([*command, *here])
    assert done.returncode != 0
    assert "GTest::gmock" in done.stderr  # it came so far
    assert not (tmp_path / "_deps").exists()
    without = Processes(120).run([*building.configure(False, "9.0"), *here])
    assert without.returncode == 0, without.stderr


def test_sources_of_googletest_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.GOOGLETEST, "/sources")
    command = building.configure(True, "9.0")
    assert "-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=/sources" in command
    assert not any("DISCONNECTED" in argument for argument in command)


class FakeProcesses:
    """Answers commands by a word in them; the first that fits."""

    def __init__(self, *answers: tuple[str, int, str]) -> None:
        self.answers = answers
        self.commands: list[str] = []

    def run(
        self, command: Any, environment: Any = None
    ) -> subprocess.CompletedProcess[str]:
        self.commands.append(" ".join(map(str, command)))
        _, code, text = next(a for a in self.answers if a[0] in self.commands[-1])
        return subprocess.CompletedProcess(command, code, text, "")

    checked = run


@pytest.mark.parametrize("code", [0, 1])
def test_without_googletest_the_rest_is_built(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = type("properties", (), {"major": 9, "minor": 0})
    monkeypatch.setattr(building, "torch_for_cuda", lambda: None)
    monkeypatch.setattr(building, "the_gpu", lambda torch, any_gpu: gpu)
    processes: Any = FakeProcesses(("TESTS=ON", code, ""), ("", 0, ""))
    figures = building.Build().run(processes)
    assert figures == {"arch": "9.0", "tests": code == 0}
    configured = [c for c in processes.commands if "-DLOWTIDE_TESTS" in c]
    assert len(configured) == 1 + code
    (build,) = (c for c in processes.commands if " --build " in c)
    assert ("ops_test" in build) == (code == 0)


# -- tests ----------------------------------------------------------------------------

CTEST = """\
2: [ RUN      ] Devices/ForeachTest.Copies/cpu
2: [       OK ] Devices/ForeachTest.Copies/cpu (1 ms)
2: [ RUN      ] Devices/ForeachTest.Copies/cuda
2: [       OK ] Devices/ForeachTest.Copies/cuda (1 ms)
2: [ RUN      ] Devices/ForeachTest.Adds/cuda
2: [  FAILED  ] Devices/ForeachTest.Adds/cuda, where GetParam() = 1 (1 ms)
2: [  PASSED  ] 2 tests.
2: [  FAILED  ] 1 test, listed below:
2: [  FAILED  ] Devices/ForeachTest.Adds/cuda, where GetParam() = 1
"""


def test_tests_are_counted_by_what_googletest_says() -> None:
    figures = building.counts(CTEST, 8)
    assert figures == {
        "passed": 2,
        "passed on CUDA": 1,
        "failed": 1,
        "names of failed": ["Devices/ForeachTest.Adds/cuda"],
    }
    (bar,) = bars.missed(building.CppTests().rows(figures))
    assert bar == "C++ tests: failed"
    with pytest.raises(RuntimeError, match="exit 8"):
        building.counts("Segmentation fault", 8)


def test_what_the_sanitizer_found_is_missed() -> None:
    assert sanitizer.summary("========= ERROR SUMMARY: 0 errors", 0) == 0
    assert sanitizer.summary("========= ERROR SUMMARY: 2 errors", 1) == 2
    racecheck = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors)"
    assert sanitizer.summary(racecheck, 0) == 3
    for text, code in (("ERROR SUMMARY: 0 errors", 1), ("nothing", 0)):
        with pytest.raises(RuntimeError):
            sanitizer.summary(text, code)
    found = sanitizer.Sanitizer().rows(
        {"errors": {"memcheck, kernels": 2}, "found": {}}
    )
    assert bars.missed(found) == ["compute-sanitizer: errors, memcheck, kernels"]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (building.CppTests(), building.NO_GTEST),
        (sanitizer.Sanitizer(), sanitizer.ABSENT),
    ],
)
def test_what_was_not_installed_is_stated(
    step: Any, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(type(step), "run", lambda self, run: {"missing": reason})
    progress = Progress(tmp_path / "steps.json", {})
    outcome = progress.run([step], budget=float("inf"))
    (row,) = check.rows_of_step(step, progress, outcome)
    assert (row.quantity, row.kind, row.value) == (step.what, "missing", None)
    assert row.note == reason


# -- what was found by the sanitizer --------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sanitizer, "of_toolkit", lambda name: name)
    monkeypatch.setattr(sanitizer, "BUILD", tmp_path)
    return tmp_path


CLEAN = "========= ERROR SUMMARY: 0 errors"


def test_errors_are_shown_with_the_end_of_the_output(tools: Path) -> None:
    (tools / "ops_test").touch()
    wrong = "========= Invalid __global__ read\n========= ERROR SUMMARY: 2 errors\n"
    processes: Any = FakeProcesses(
        ("racecheck", 0, "========= RACECHECK SUMMARY: 0 hazards displayed"),
        ("ops_test", 1, wrong),
        ("llama_memory.py", 0, CLEAN),
    )
    figures = sanitizer.Sanitizer().run(processes)
    assert figures["errors"] == {
        "memcheck, kernels": 2,
        "racecheck, kernels": 0,
        "memcheck, training step": 0,
    }
    assert figures["found"] == {"memcheck, kernels": wrong}
    notes = {r.quantity: r.note for r in sanitizer.Sanitizer().rows(figures) if r.note}
    assert notes == {
        "compute-sanitizer: errors, memcheck, kernels": (
            "========= Invalid __global__ read / ========= ERROR SUMMARY: 2 errors"
        )
    }


def test_what_torch_asks_of_the_runtime_is_no_error(tools: Path) -> None:
    (tools / "ops_test").touch()
    processes: Any = FakeProcesses(
        ("racecheck", 0, "========= RACECHECK SUMMARY: 0 hazards displayed"),
        ("memcheck", 0, CLEAN),
    )
    sanitizer.Sanitizer().run(processes)
    memcheck = [c for c in processes.commands if "--tool memcheck" in c]
    assert len(memcheck) == 2
    for command in memcheck:
        program = command.index("ops_test" if "ops_test" in command else "llama_memory")
        assert command.index("--report-api-errors no") < program


def test_a_device_that_the_sanitizer_does_not_know(tools: Path) -> None:
    said = "========= Error: Device not supported. Please refer to the documentation"
    processes: Any = FakeProcesses(("", 1, said))
    figures = sanitizer.Sanitizer().run(processes)
    assert figures == {"missing": sanitizer.REFUSED}
