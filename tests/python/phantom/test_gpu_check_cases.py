"""The two cases that gpu_check runs, tiny, over the dry driver."""

from __future__ import annotations

from typing import Any

import pytest

from support import workspaces
from support.gpu_check import check_dry

pytestmark = pytest.mark.slow

FLAT_SYSTEMS = ("per_parameter", "cat", "flat", "lowtide", "fused")
LAYERS, RESIDUAL = 4, 256 * 128 * 4  # bytes


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    steps = ("case1-memory", "case1-speed", "case2-memory", "case2-speed")
    return check_dry(tmp_path_factory.mktemp("dry"), *steps)[0]


def test_flat_gradients(seen: dict[str, Any]) -> None:
    peaks = seen["case1-memory"]["default"]
    if workspaces.KEPT:  # else the peak of so small a model is a product's
        assert peaks["lowtide"]["allocated"] < peaks["cat"]["allocated"]
    times = seen["case1-speed"]["ms"]
    assert set(times) == set(peaks) == {*FLAT_SYSTEMS}
    assert times["lowtide"] == [1.0, 1.0]  # what the driver's clock says


def test_offload_of_the_residual(seen: dict[str, Any]) -> None:
    peaks = seen["case2-memory"]
    assert peaks["nothing named"]["host"] == 0
    assert peaks["offload residual"]["host"] == LAYERS * RESIDUAL
    assert peaks["offload both"]["host"] == 2 * LAYERS * RESIDUAL
    held = peaks["nothing named"]["held"] - peaks["offload residual"]["held"]
    assert held == (LAYERS - 2) * RESIDUAL  # one on its way, one for the loss
    speed = seen["case2-speed"]
    assert set(speed["ms"]) == {*peaks, "save hidden"}
    assert {len(times) for times in speed["ms"].values()} == {3}
    bases = {system: ratio["base"] for system, ratio in speed["ratio"].items()}
    assert bases == {
        "offload residual": "nothing named",
        "offload both": "save hidden",
    }
