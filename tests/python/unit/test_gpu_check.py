"""benchmarks/gpu_check.sh without a GPU: what it says, how it goes on, what it finds in
figures made up here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
for folder in ("benchmarks/gpu", "benchmarks/programs", "benchmarks"):
    sys.path.insert(0, str(ROOT / folder))

import bars  # noqa: E402
import building  # noqa: E402
import check  # noqa: E402
import measurements  # noqa: E402
import prerequisites  # noqa: E402
from case import Row  # noqa: E402
from progress import OtherMachine, Outcome, Progress  # noqa: E402
from scale import FULL  # noqa: E402
from steps import steps  # noqa: E402

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


# -- bars ---------------------------------------------------------------------------


def missed(rows: Any) -> list[str]:
    return [quantity.split(",")[0] for quantity in bars.missed(rows)]


def peaks(reserved: float, allocated: float) -> dict[str, float]:
    return {"reserved": reserved * GIB, "allocated": allocated * GIB}


def slice_of(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    systems = {"lowtide": ours, "fsdp2": theirs, "lowtide, vocabulary loss": ours}
    return {"default": systems}


def case1(lowtide: float) -> dict[str, Any]:
    found = {"per_parameter": 15.1, "cat": 100.0, "flat": 15.1, "lowtide": lowtide}
    return {
        "peaks": {"default": {name: peaks(gib, gib) for name, gib in found.items()}},
        "speed": {"ms": {name: [1.0, 2.0, 4.0] for name in found}, "flops": 10**9},
    }


def case2(device: float, ratio: float) -> dict[str, Any]:
    names = measurements.RESIDUAL_SYSTEMS
    spread = {"median": ratio, "low": 0.9, "high": 1.1}
    return {
        "peaks": {name: peaks(device, device) | {"host": 0} for name in names},
        "speed": {
            "ms": {name: [1.0] for name in names},
            "ratio": {name: spread for name in names[1:]},
        },
    }


def speed(ratio: float) -> dict[str, Any]:
    spread = {"median": ratio, "low": 0.9, "high": 1.1}
    return {"ms": {"lowtide": [1.0], "fsdp2": [1.0]}, "ratio": spread, "flops": 1}


SLICE: Callable[[Any], Any] = lambda f: measurements.llama_memory_rows("full", f)  # noqa: E731


@pytest.mark.parametrize(
    ("rows", "good", "bad", "quantities"),
    [
        (
            SLICE,
            slice_of(peaks(95, 95 / 1.05), peaks(100, 90)),
            slice_of(peaks(95.1, 95), peaks(100, 90)),
            ["of FSDP2's reserved"],
        ),
        (
            SLICE,
            slice_of(peaks(52.5, 50), peaks(100, 90)),
            slice_of(peaks(53, 50), peaks(100, 90)),
            ["reserved / allocated"],
        ),
        (
            measurements.flat_gradients_rows,
            case1(88.0),
            case1(88.1),
            ["of what cat reserves"],
        ),
        (
            measurements.llama_speed_rows,
            speed(1.02),
            speed(1.021),
            ["step time beside FSDP2's"],
        ),
        (
            measurements.residual_rows,
            case2(5.6, 1.02),
            case2(5.61, 1.03),
            [
                "case 2: device",
                "case 2: step time beside no offload",
                "case 2: step time beside no offload",
            ],
        ),
    ],
)
def test_a_figure_above_its_bar_is_shown_as_missed(
    rows: Any, good: Any, bad: Any, quantities: list[str]
) -> None:
    assert missed(rows(good)) == []
    assert missed(rows(bad)) == quantities


def test_each_bar_stands_beside_its_figure() -> None:
    rows = list(measurements.flat_gradients_rows(case1(15.1)))
    quantity = "of what cat reserves, case 1, default segments"
    values = {r.system: r.value for r in rows if r.quantity == quantity}
    assert values["lowtide"] == pytest.approx(0.151)
    assert (values["bar"], values["met"]) == (0.88, True)
    rate = {r.system: r.value for r in rows if r.quantity == "rate, case 1"}
    assert rate["cat"] == pytest.approx(0.5)  # 1e9 FLOPs in 2 ms
    (fused,) = (r for r in rows if r.system == "fused")
    assert (fused.kind, fused.note) == ("missing", "fully_shard has no keyword grads")


def test_fused_gradients_have_a_column_once_they_exist() -> None:
    figures = case1(15.1)
    figures["peaks"]["default"]["fused"] = peaks(12, 11)
    figures["speed"]["ms"]["fused"] = [1.0]
    rows = [r for r in measurements.flat_gradients_rows(figures) if r.system == "fused"]
    assert "missing" not in {r.kind for r in rows}
    values = {r.quantity: r.value for r in rows}
    assert values["rate beside cat's, case 1"] == 2.0
    assert values["reserved, case 1, default segments"] == 12


def test_a_difference_of_the_allocator_model_is_missed() -> None:
    seen = {
        "calls observed": 10,
        "differences in the history": 0,
        "differences in allocated": 0,
        "differences in reserved": 1,
        "cuda": peaks(1, 1),
        "model": peaks(1, 1),
        "ledger": {"ledger's peak": GIB},
    }
    figures = {"default": {"cuda": seen, "simulated": peaks(1, 1)}}
    rows = list(measurements.replay_rows(figures))
    assert bars.missed(rows) == ["replay, default segments: differences in reserved"]
    kinds = {r.system: r.kind for r in rows if "peak reserved" in r.quantity}
    assert kinds == {
        "CUDA": "measured",
        "model, asked the same": "simulated",
        "simulated step": "simulated",
    }


def test_host_time_is_what_sharding_adds() -> None:
    phases = {"forward": 1.0, "backward": 2.0}
    figures = {
        "plain": phases,
        "lowtide": {"forward": 1.5, "backward": 3.0},
        "fsdp2": {"forward": 11.0, "backward": 12.0},
    }
    rows = list(measurements.host_units_rows(figures))
    added = {r.system: r.value for r in rows if r.quantity == "host time per unit"}
    assert added == {"lowtide": 1.5, "fsdp2": 20.0}


def test_a_peak_that_the_allocator_lowered_is_no_figure() -> None:
    seen = {"steady": peaks(1, 1), "retries": 0}
    assert measurements.steady(seen) == peaks(1, 1)
    with pytest.raises(RuntimeError, match="got 2 allocations that had to be tried"):
        measurements.steady(seen | {"retries": 2})


# -- tests and sanitizer ------------------------------------------------------------

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
    assert building.summary("========= ERROR SUMMARY: 0 errors", 0) == 0
    assert building.summary("========= ERROR SUMMARY: 2 errors", 1) == 2
    racecheck = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors)"
    assert building.summary(racecheck, 0) == 3
    for text, code in (("ERROR SUMMARY: 0 errors", 1), ("nothing", 0)):
        with pytest.raises(RuntimeError):
            building.summary(text, code)
    found = building.Sanitizer().rows({"errors": {"memcheck, kernels": 2}})
    assert bars.missed(found) == ["compute-sanitizer: errors, memcheck, kernels"]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (building.CppTests(), building.NO_GTEST),
        (building.Sanitizer(), building.NO_SANITIZER),
    ],
)
def test_what_was_not_installed_is_stated(step: Any, reason: str) -> None:
    (row,) = step.rows({"missing": reason})
    assert isinstance(row, Row)
    assert (row.kind, row.value, row.note) == ("missing", None, reason)


def test_the_report_has_every_row_and_every_step_that_was_not_run(
    tmp_path: Path,
) -> None:
    progress = Progress(tmp_path / "steps.json", HERE)
    links = FakeStep("links")
    links.run = lambda: {"h2d": 50.0, "d2h": 51.0, "both": 90.0}  # type: ignore[method-assign]
    progress.run([links], budget=1e9, say=quiet)
    outcome = Outcome(failed={"speed": "Traceback\nOutOfMemoryError: 80 GiB"})
    planned = steps(FULL)
    rows = {step.what: check.rows_of_step(step, progress, outcome) for step in planned}
    text = check.report(rows, {"GPU": "one"}, tmp_path)
    assert "| link, both at once | 90 | GB/s | measured |" in text
    assert "1. failed: OutOfMemoryError: 80 GiB" in text
    assert text.count("1. not run") == len(planned) - 2
    assert (tmp_path / "gpu_check.md").read_text() == text + "\n"
    stored = json.loads((tmp_path / "gpu_check.json").read_text())
    assert stored["environment"] == {"GPU": "one"}
    assert len(stored["rows"]) == sum(map(len, rows.values()))
