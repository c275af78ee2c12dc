"""What gpu_check measures in bytes, in tiny sizes on torch's own CUDA operators and
allocator over the dry driver: kernels compute nothing there."""

from __future__ import annotations

from typing import Any

import check
import measure_parts
import pytest

from support.gpu_check import ROOT, check_dry

pytestmark = pytest.mark.slow
STORED = ROOT / "benchmarks/results/gpu_check"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    steps = ("memory-full", "ledger", "addresses")
    return check_dry(tmp_path_factory.mktemp("dry"), *steps)[0]


def test_lowtide_reserves_less_than_fsdp2(seen: dict[str, Any]) -> None:
    figures: dict[str, Any] = seen["memory-full"]["default"]
    assert figures["lowtide"]["reserved"] < figures["fsdp2"]["reserved"]
    assert figures["fsdp2"]["moments"]["backward"]["reserved"] > 0


def test_the_dry_step_takes_as_much(seen: dict[str, Any]) -> None:
    both = seen["ledger"]["default"]
    assert both["dry"] == both["cuda"]
    assert both["dry"]["allocated"] > 0


def test_memory_lies_where_a_gpu_puts_it(seen: dict[str, Any]) -> None:
    """An H200, but for what the process had mapped between."""
    stored = check.kept(STORED, "addresses")
    assert seen["addresses"]["CUDA"] == stored["dry"]
    (row,) = measure_parts.addresses_rows(stored)
    assert (len(stored["CUDA"]), row.value) == (65, 56)


def test_the_ledger_has_what_the_allocator_has(seen: dict[str, Any]) -> None:
    """Beside the optimizer's state, the buffers, and cuBLAS's workspaces of 32 MiB."""
    ledger = seen["ledger"]["default"]["ledger"]
    rest = ledger["allocated between steps"]
    rest -= ledger["of it in the ledger"] + ledger["of it optimizer and buffers"]
    rest %= 32 << 20
    assert 0 <= rest < 16 * 512  # sizes are rounded to 512 bytes
    assert 0 < ledger["of it in the ledger"] < ledger["ledger's peak"]
    assert ledger["ledger's peak"] <= ledger["ledger's planned peak"]
