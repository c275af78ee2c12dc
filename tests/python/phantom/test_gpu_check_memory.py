"""What gpu_check measures in bytes, in tiny sizes on torch's own CUDA operators and
allocator over the dry driver: kernels compute nothing there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.gpu_check import GpuCheck


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> GpuCheck:
    folder = tmp_path_factory.mktemp("dry")
    steps = ("memory-full", "ledger")
    return GpuCheck.run(folder / "out", *steps)


def test_each_step_is_kept(seen: GpuCheck) -> None:
    assert set(seen.figures) == {"memory-full", "ledger"}
    missing = {row["quantity"] for row in seen.rows if row["kind"] == "missing"}
    assert "step time of the slice, NCCL, loss plain" in missing
    assert "peaks of the slice at world 8, checkpoint full" not in missing


def test_lowtide_reserves_less_than_fsdp2(seen: GpuCheck) -> None:
    figures: dict[str, Any] = seen.figures["memory-full"]["default"]
    assert figures["lowtide"]["reserved"] < figures["fsdp2"]["reserved"]
    assert figures["fsdp2"]["moments"]["backward"]["reserved"] > 0


def test_the_dry_step_takes_as_much(seen: GpuCheck) -> None:
    both = seen.figures["ledger"]["default"]
    assert both["dry"] == both["cuda"]
    assert both["dry"]["allocated"] > 0


def test_the_ledger_has_what_the_allocator_has(seen: GpuCheck) -> None:
    """Beside the optimizer's state, the buffers, and cuBLAS's workspaces of 32 MiB."""
    ledger = seen.figures["ledger"]["default"]["ledger"]
    rest = ledger["allocated between steps"]
    rest -= ledger["of it in the ledger"] + ledger["of it optimizer and buffers"]
    rest %= 32 << 20
    assert 0 <= rest < 16 * 512  # sizes are rounded to 512 bytes
    assert 0 < ledger["of it in the ledger"] < ledger["ledger's peak"]
    assert ledger["ledger's peak"] <= ledger["ledger's planned peak"]


def test_a_second_run_measures_nothing_again(seen: GpuCheck, tmp_path: Path) -> None:
    assert seen.again() == ["memory-full: done before", "ledger: done before"]
    stored = json.loads((seen.out / "steps.json").read_text())
    assert stored["of"]["tiny"] is True
