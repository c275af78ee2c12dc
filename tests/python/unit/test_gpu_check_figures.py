"""What gpu_check finds in figures made up here: bars, a step that fails, and the order
of the command."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import bars
import check
import measure_cases
import measure_clock
import measure_frameworks
import measure_ledger
import measure_llama
import measure_parts
import measure_plan
import measure_trainer
import pytest
import results
from figures import spread
from scale import TINY
from timing import ratio as ratio_of

ROOT = Path(__file__).parents[3]
GIB = 1 << 30


def missed(rows: Any) -> list[str]:
    return [quantity.split(",")[0] for quantity in bars.missed(rows)]


def peaks(reserved: float, allocated: float) -> dict[str, float]:
    return {"reserved": reserved * GIB, "allocated": allocated * GIB}


def slice_of(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    systems = {"lowtide": ours, "fsdp2": theirs, "lowtide, vocabulary loss": ours}
    return {"default": systems}


def case1_memory(lowtide: float) -> dict[str, Any]:
    found = {"per_parameter": 15.1, "cat": 100.0, "flat": 15.1, "lowtide": lowtide}
    return {"default": {name: peaks(gib, gib) for name, gib in found.items()}}


BASES = {"offload residual": "nothing named", "offload both": "save hidden"}


def case2_memory(device: float) -> dict[str, Any]:
    return {name: peaks(device, device) | {"host": 0} for name in BASES}


def case2_speed(ratio: float) -> dict[str, Any]:
    spread = {"median": ratio, "low": 0.9, "high": 1.1, "share": "all"}
    return {
        "rows": 8,
        "ms": {name: [1.0] for pair in BASES.items() for name in pair},
        "ratio": {name: spread | {"base": base} for name, base in BASES.items()},
    }


def speed(ratio: float) -> dict[str, Any]:
    spread = {"median": ratio, "low": 0.9, "high": 1.1, "share": "half"}
    return {"ms": {"lowtide": [1.0], "fsdp2": [1.0]}, "ratio": spread, "flops": 1}


def bits(momenta: int, loss: float, of_hidden: float) -> dict[str, Any]:
    errors = {"loss": loss, "hidden": of_hidden, "weight": 0.0}
    none = {"losses": 0, "parameters": 0}
    return {
        "beside FSDP2": {"FSDP2 again": none, "lowtide": none},
        "Muon beside whole matrices": {"matrices": 0, "momenta": momenta},
        "gradient errors": {"exact": 1e-3, "fused": 1e-6},
        "deferred errors": {"bf16": {"plain": errors, "lowtide": errors}},
    }


SLICE = partial(measure_llama.llama_memory_rows, "full")
SPEED = partial(measure_llama.llama_speed_rows, "plain")


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
            measure_llama.bits_rows,
            bits(0, 1e-6, 2**-6),
            bits(1, 1.1e-6, 1.1 * 2**-6),
            [
                "elements of momenta whose bits differ from whole matrices'",
                "error of the loss",
                "error of the gradient of the hidden",
            ],
        ),
        (
            measure_cases.flat_peaks_rows,
            case1_memory(88.0),
            case1_memory(88.1),
            ["of what cat reserves"],
        ),
        (
            SPEED,
            speed(1.02),
            speed(1.021),
            ["step time beside FSDP2's"],
        ),
        (
            measure_cases.residual_peaks_rows,
            case2_memory(5.6),
            case2_memory(5.61),
            ["case 2: device"],
        ),
        (
            measure_cases.residual_speed_rows,
            case2_speed(1.02),
            case2_speed(1.03),
            ["case 2: step time", "case 2: step time"],
        ),
    ],
)
def test_a_figure_above_its_bar_is_shown_as_missed(
    rows: Any, good: Any, bad: Any, quantities: list[str]
) -> None:
    assert missed(rows(good)) == []
    assert missed(rows(bad)) == quantities


def test_each_bar_stands_beside_its_figure() -> None:
    rows = measure_cases.flat_peaks_rows(case1_memory(15.1))
    quantity = "of what cat reserves, case 1, default segments"
    values = {r.system: r.value for r in rows if r.quantity == quantity}
    assert values["lowtide"] == pytest.approx(0.151)
    assert (values["bar"], values["met"]) == (0.88, True)


def test_rates_stand_beside_that_of_cat() -> None:
    times = {"cat": [1.0, 2.0, 4.0], "fused": [1.0, 1.0, 1.0]}
    rows = list(measure_cases.flat_speed_rows({"ms": times, "flops": 10**9}))
    values = {(r.system, r.quantity): r.value for r in rows}
    assert values["cat", "rate, case 1"] == pytest.approx(0.5)  # 1e9 FLOPs in 2 ms
    assert values["fused", "rate beside cat's, case 1"] == 2.0


def test_a_difference_from_the_dry_step_is_missed() -> None:
    seen = {
        "cuda": peaks(1, 2),
        "dry": peaks(1, 3),
        "ledger": {"ledger's peak": GIB},
    }
    rows = list(measure_ledger.ledger_rows({"default": seen}))
    (missed,) = bars.missed(rows)
    assert missed.startswith("two blocks, default segments: peak ")
    kinds = {r.system: r.kind for r in rows if r.quantity.endswith("peak reserved")}
    assert kinds == {"CUDA": "measured", "dry": "simulated"}


def test_host_time_is_what_sharding_adds() -> None:
    calls = {"allgather_base": 1.97, "reduce_scatter_base": 1.0}
    phases = {
        "plain": {"forward": 1.0, "backward": 2.0},
        "lowtide": {"forward": 2.5, "backward": 3.0},
        "fsdp2": {"forward": 11.0, "backward": 12.0},
    }
    group = {"plain": 0.0, "lowtide": 1.0, "fsdp2": 4.0}
    figures = {
        name: {"phases": phases[name], "group": group[name], "calls": calls}
        for name in phases
    }
    rows = list(measure_parts.host_units_rows(figures))
    values = {(r.quantity, r.system): r.value for r in rows}
    added = "host time per unit"
    assert values[added, "lowtide"] == 2.5 and values[added, "fsdp2"] == 20
    outside = "host time per unit outside the process group"
    assert values[outside, "lowtide"] == 1.5 and values[outside, "fsdp2"] == 16
    (note,) = {r.note for r in rows if r.note}
    assert note.endswith("per unit 1.97 allgather_base, 1.00 reduce_scatter_base")


@pytest.mark.parametrize(
    ("rounds", "low", "high", "said"),
    [
        (2, 1.0, 1.1, "all of the rounds between 1.000 and 1.100"),
        (3, 1.0, 1.2, "all of the rounds between 1.000 and 1.200"),
        (7, 1.1, 1.5, "half of the rounds between 1.100 and 1.500"),
    ],
)
def test_a_spread_lies_within_what_was_seen(
    rounds: int, low: float, high: float, said: str
) -> None:
    found = ratio_of([1.0 + place / 10 for place in range(rounds)], [1.0] * rounds)
    assert (found["low"], found["high"]) == pytest.approx((low, high))
    assert spread(found) == said


def test_case_2_is_said_to_be_in_fp32() -> None:
    rows = measure_cases.residual_speed_rows(case2_speed(1))
    steps = [r for r in rows if "step" in r.quantity and r.unit == "ms"]
    assert len(steps) == 4
    assert {r.note for r in steps} == {"fp32 without TF32"}


def test_a_peak_that_the_allocator_lowered_is_no_figure() -> None:
    seen = {"steady": peaks(1, 1), "retries": 0}
    assert measure_llama.steady(seen) == peaks(1, 1)
    with pytest.raises(RuntimeError, match="got 2 allocations that had to be tried"):
        measure_llama.steady(seen | {"retries": 2})


def test_a_step_that_fails_is_a_row_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(scale: Any, programs: Any) -> Any:
        raise RuntimeError("x.py: exit 1\nTraceback\nOutOfMemoryError: 80 GiB\n")

    step = check.Step("speed", "step time", fail, lambda figures: iter(()))
    (row,) = check.rows_of(step, TINY, check.Programs(), tmp_path)
    assert (row.kind, row.quantity) == ("missing", "step time")
    assert row.note == "x.py: exit 1 ... OutOfMemoryError: 80 GiB"


def test_the_clock_stands_beside_what_was_measured() -> None:
    times = {"product: a": 2.0, "product: b": 1.0, "small": 4.0}
    said = {"product: a": 4.0, "product: b": 8.0, "small": 1.0}
    rows = list(measure_clock.clock_rows({"operators": {"CUDA": times, "clock": said}}))
    values = {r.quantity: r.value for r in rows if r.quantity.endswith("of CUDA's")}
    assert values == {
        "operators, product: of CUDA's": pytest.approx(4),  # of 2 and 8
        "operators, small: of CUDA's": pytest.approx(0.25),
    }


def test_a_plan_is_off_by_a_share_of_what_was_measured() -> None:
    seen = {"max_allocated": 4 * GIB, "max_reserved": 8 * GIB}
    said = {"max_allocated": 4 * GIB, "max_reserved": 7 * GIB}
    rows = list(measure_plan.plan_rows({"x": {"CUDA": seen, "dry": said}}))
    errors = {r.quantity: r.value for r in rows if r.system == "error in %"}
    assert errors == {"x: max allocated": 0, "x: max reserved": -12.5}


def test_lines_that_differ_or_lack_are_counted() -> None:
    lines = ["loss 1", "loss 2", "parameters a"]
    said = {
        "fsdp2": lines,
        "fsdp2 again": lines,
        "lowtide": ["loss 1", "loss 3"],
    }
    rows = list(measure_frameworks.frameworks_rows({"peft": said}))
    assert [r.value for r in rows if r.system in ("lowtide", "fsdp2")] == [0, 2]
    (missed,) = bars.missed(rows)
    assert missed == "peft, lowtide: lines of 3 that differ from FSDP2's"
    assert measure_frameworks.of_training(["a", *lines, "{'loss': 1}"]) == lines


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla V100", "h100"),
    ],
)
def test_the_dry_gpu_is_of_the_kind_that_is_there(
    monkeypatch: pytest.MonkeyPatch, named: str, kind: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: named)
    assert check.kind_of_gpu() == kind


def test_ranks_ask_for_an_nccl_that_lets_them_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    with pytest.raises(RuntimeError, match=r"expected NCCL 2\.30 .* got 2\.28\.9"):
        measure_llama.require_sharing()
    monkeypatch.setenv("LOWTIDE_NCCL", "libnccl.so.2")
    measure_llama.require_sharing()
    monkeypatch.delenv("LOWTIDE_NCCL")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 7))
    measure_llama.require_sharing()


def test_figures_of_another_run_are_read_without_a_gpu(tmp_path: Path) -> None:
    figures, out = tmp_path / "figures", tmp_path / "out"
    check.keep(figures, "environment", {"GPU": "of another machine"})
    check.keep(figures, "links", {"h2d": 1.0, "d2h": 2.0, "both": 2.5})
    check.keep(figures, "kernels", {"copy": 1.0})
    asked = ["--read", str(figures), "--out", str(out), "links"]
    assert check.main(asked) == 0
    result = results.read(out / "gpu_check.json")
    assert result.environment == {"GPU": "of another machine"}
    assert [r.value for r in result.rows] == [1.0, 2.0, 2.5]
    assert "of another machine" in (out / "gpu_check.md").read_text()


def test_a_trainer_is_held_beside_the_dry_one_and_beside_fsdp2s() -> None:
    def of(reserved: float) -> dict[str, Any]:
        return {"CUDA": peaks(reserved, reserved), "dry": peaks(1, 1)}

    names = list(measure_trainer.SYSTEMS)
    figures = dict(zip(names, map(of, (100, 96, 64)), strict=True))
    rows = list(measure_trainer.trainer_rows("eager", figures))
    assert missed(rows) == ["of FSDP2's reserved"]
    (too_much,) = bars.missed(rows)
    assert too_much.endswith("eager, lowtide")


def test_a_models_training_differs_by_a_loss_a_norm_or_a_parameter() -> None:
    said = {"steps": [[1.0, 2.0], [0.5, 1.0]], "parameters": "ab"}
    changed = {
        "a loss": said | {"steps": [[1.0, 2.0], [0.25, 1.0]]},
        "a norm": said | {"steps": [[1.0, 2.5], [0.5, 1.0]]},
        "a step": said | {"steps": said["steps"][:1]},
        "a parameter": said | {"parameters": "ac"},
    }
    for ours in changed.values():
        figures = {"llama": {"fsdp2": said, "fsdp2 again": said, "lowtide": ours}}
        ours_and_theirs = list(measure_trainer.models_rows(figures))
        assert [r.value for r in ours_and_theirs if r.system == "lowtide"] == [1]
        assert [r.value for r in ours_and_theirs if r.system == "fsdp2"] == [0]


def test_an_optimizers_step_has_a_bar() -> None:
    def of(us: float) -> dict[str, Any]:
        return {"fused": {"plain": {"us": 5.0}, "lowtide": {"us": us}}}

    assert missed(measure_parts.optimizer_rows(of(9.0)))
    assert not missed(measure_parts.optimizer_rows(of(8.0)))


# -- the command, with programs that only say that they were called --------------------

SAYS = """#!/bin/sh
echo "$(basename "$0") $*" >> "$SAID"
case "$*" in
  *get_device_capability*) echo 9.0 ;;
  *{failing}*) exit 1 ;;
esac
case "$0" in *compute-sanitizer) echo "========= ERROR SUMMARY: {errors} errors" ;; esac
"""


def command(folder: Path, failing: str = "nothing", errors: int = 0) -> tuple[Any, ...]:
    """Its exit status, and what it called."""
    for name in ("python", "cmake", "ctest", "compute-sanitizer"):
        tool = folder / name
        tool.write_text(SAYS.format(failing=failing, errors=errors))
        tool.chmod(0o755)
    said = folder / "said"
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu_check.sh"), "links"],
        env=os.environ | {"PYTHON": str(folder / "python"), "SAID": str(said)},
        capture_output=True,
        text=True,
    )
    return done.returncode, said.read_text().splitlines(), done.stdout


def test_the_command_builds_tests_measures_and_sanitizes(tmp_path: Path) -> None:
    status, calls, _ = command(tmp_path)
    assert status == 0
    assert [call.split()[0] for call in calls] == [
        *("python", "cmake", "cmake", "cmake"),  # the GPU; configure, build, install
        *("cmake", "ctest", "python"),
        *("compute-sanitizer",) * 3,
    ]
    assert "-DLOWTIDE_CUDA_ARCHS=9.0" in calls[1]
    assert "-DFETCHCONTENT_FULLY_DISCONNECTED=ON" in calls[1]
    assert calls[6].endswith("benchmarks/gpu/check.py links")
    tools = [call.split("--tool ")[1].split()[0] for call in calls[7:]]
    assert tools == ["memcheck", "racecheck", "memcheck"]


def test_without_googletest_each_kernel_runs_once(tmp_path: Path) -> None:
    status, calls, said = command(tmp_path, failing="-DLOWTIDE_TESTS=ON")
    assert status == 1 and "not there: GoogleTest" in said
    assert not [call for call in calls if call.startswith("ctest")]
    assert all("kernels.py" in call for call in calls[-3:-1])


@pytest.mark.parametrize(
    ("failing", "errors", "said"),
    [
        ("gpu/check.py", 0, "benchmarks/gpu/check.py links"),
        ("nothing", 2, "failed: sanitize --tool racecheck"),
        ("--verbose", 0, "failed: ctest"),
    ],
)
def test_what_fails_is_said_and_the_rest_goes_on(
    failing: str, errors: int, said: str, tmp_path: Path
) -> None:
    status, calls, printed = command(tmp_path, failing, errors)
    assert status == 1 and said in printed
    assert len(calls) == 10
