"""What gpu_check finds in figures made up here: bars, tests, sanitizer, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bars
import building
import check
import measurements
import pytest
from case import Row
from progress import Outcome, Progress
from scale import FULL
from steps import steps

GIB = 1 << 30


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
    found["fused"] = 12.0
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


def test_fused_gradients_have_a_column() -> None:
    figures = case1(15.1)
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
    figures = {"h2d": 50.0, "d2h": 51.0, "both": 90.0}
    done = {"links": {"seconds": 1.0, "figures": figures}}
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"of": {}, "steps": done}))
    progress = Progress(path, {})
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
