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


@pytest.mark.parametrize("place", ["/sources", "sources"])
def test_sources_of_googletest_are_used(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CMake would look for a relative path in the build."""
    monkeypatch.chdir("/")
    monkeypatch.setenv(building.GOOGLETEST, place)
    command = building.configure(True, "9.0")
    assert "-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=/sources" in command
    assert not any("DISCONNECTED" in argument for argument in command)


class FakeProcesses:
    """Answers commands by a word in them; the first that fits."""

    def __init__(self, *answers: tuple[str, int, str]) -> None:
        self.answers = answers
        self.commands: list[str] = []
        self.environments: list[Any] = []

    def run(
        self, command: Any, environment: Any = None
    ) -> subprocess.CompletedProcess[str]:
        self.commands.append(" ".join(map(str, command)))
        self.environments.append(environment)
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
    assert build.endswith("--target dev")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(building, "BUILD", tmp_path)
    return tmp_path / "CMakeCache.txt"


def test_tests_are_compiled_by_their_own_step(cache: Path) -> None:
    """If they do not compile, the rest is measured all the same."""
    processes: Any = FakeProcesses(("--build", 0, ""), ("--test-dir", 0, CTEST))
    with pytest.raises(RuntimeError, match="^tests: expected what the step build"):
        building.CppTests().run(processes)
    cache.write_text("LOWTIDE_TESTS:BOOL=OFF\n")
    assert building.CppTests().run(processes) == {"missing": building.NO_GTEST}
    assert processes.commands == []
    cache.write_text("LOWTIDE_TESTS:BOOL=ON\n")
    assert building.CppTests().run(processes)["passed"] == 2
    build, test = processes.commands
    assert build.endswith("--target device_test ops_test") and "--test-dir" in test


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


MEMCHECK = sanitizer.sanitizers()[0]
RACECHECK = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


def test_what_the_sanitizer_found_is_missed() -> None:
    assert sanitizer.summary("========= ERROR SUMMARY: 0 errors", 0) == 0
    assert sanitizer.summary("========= ERROR SUMMARY: 2 errors", 1) == 2
    racecheck = RACECHECK.replace("0 hazards", "3 hazards")
    assert sanitizer.summary(RACECHECK, 0) == 0
    assert sanitizer.summary(racecheck, 0) == 3
    nothing_ran = (
        "[==========] Running 0 tests from 0 test suites.\nERROR SUMMARY: 0 errors"
    )
    for text, code in (
        ("ERROR SUMMARY: 0 errors", 1),
        ("nothing", 0),
        (nothing_ran, 0),
    ):
        with pytest.raises(RuntimeError):
            sanitizer.summary(text, code)
    found = MEMCHECK.rows({"errors": 2, "found": ""})
    assert bars.missed(found) == ["memcheck of the kernels: errors"]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (building.CppTests(), building.NO_GTEST),
        (MEMCHECK, sanitizer.ABSENT),
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
    wrong = "========= Invalid __global__ read\n========= ERROR SUMMARY: 2 errors\n"
    processes: Any = FakeProcesses(("", 1, wrong))
    figures = MEMCHECK.run(processes)
    assert figures == {"errors": 2, "found": wrong}
    (note,) = {r.note for r in MEMCHECK.rows(figures) if r.note}
    assert (
        note == "========= Invalid __global__ read / ========= ERROR SUMMARY: 2 errors"
    )
    clean: Any = FakeProcesses(("", 0, CLEAN))
    assert MEMCHECK.run(clean) == {"errors": 0, "found": ""}


def test_without_its_tests_each_kernel_runs_once(tools: Path) -> None:
    (*_, program, _, _) = sanitizer.kernels()
    assert program.endswith("benchmarks/gpu/kernels.py")
    tests = tools / "ops_test"
    tests.touch()
    assert sanitizer.kernels() == (str(tests), "--gtest_filter=*cuda*")


def test_torchs_kernels_are_checked_in_the_training_step_only(tools: Path) -> None:
    (tools / "ops_test").touch()
    processes: Any = FakeProcesses(("racecheck", 0, RACECHECK), ("", 0, CLEAN))
    for step in sanitizer.sanitizers():
        step.run(processes)
    memcheck, racecheck, training = processes.commands
    for command in (memcheck, racecheck):
        assert command.index("--kernel-name kns=lowtide") < command.index("ops_test")
    assert "--kernel-name" not in training
    for command in (memcheck, training):
        assert "--tool memcheck --padding 32 --report-api-errors no" in command


def test_memcheck_sees_the_bounds_of_each_tensor(tools: Path) -> None:
    processes: Any = FakeProcesses(("", 0, CLEAN))
    MEMCHECK.run(processes)
    (environment,) = processes.environments
    assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


def test_a_device_that_the_sanitizer_does_not_know(tools: Path) -> None:
    said = "========= Error: Device not supported. Please refer to the documentation"
    processes: Any = FakeProcesses(("", 1, said))
    assert MEMCHECK.run(processes) == {"missing": sanitizer.REFUSED}
