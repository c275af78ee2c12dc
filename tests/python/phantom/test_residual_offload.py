"""The residual of the report's size, sent to the host over the dry driver: bytes are
those of its window, whatever the depth."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch import run

from lowtide.phantom.dry.launch import Machine

GIB = 1 << 30
# [16, 4096, 2048] in fp32, over 8 devices.
ROWS, WIDTH, WORLD = 16 * 4096, 2048, 8


def simulate(*specs: str) -> list[dict[str, Any]]:
    arguments = ("residual_full_scale.py", str(WORLD), str(WIDTH), *specs)
    figures = json.loads(run(*arguments, machine=Machine(world=WORLD), timeout=600))
    return [figures[spec] for spec in specs]


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, int, int], dict[str, Any]]:
    """(system, prefetch, layers) -> figures."""
    keys = [
        (system, prefetch, layers)
        for system, prefetch, _, _ in CASES
        for layers in (LAYERS // 2, LAYERS)
    ]
    specs = [f"{system}:{layers}:{ROWS}:{p}" for system, p, layers in keys]
    return dict(zip(keys, simulate(*specs), strict=True))


LAYERS = 32
# (system, prefetch, values in the window, most GiB). Published: 4.27 GiB beside the
# residuals of 0.5 GiB each.
CASES = [
    ("offload residual", 1, 2, 4.27 + 0.5 * 2 + 0.5),
    ("offload residual", 2, 3, 4.27 + 0.5 * 3 + 0.5),
    ("offload both", 1, 4, 4.75),
    ("nothing named", 1, LAYERS, 20.27),
]


@pytest.mark.parametrize(("system", "prefetch", "window", "bar"), CASES[:3])
def test_bytes_do_not_depend_on_the_depth(
    system: str, prefetch: int, window: int, bar: float, seen: Any
) -> None:
    half, full = (seen[system, prefetch, n] for n in (LAYERS // 2, LAYERS))
    residual = full["residual"]
    assert residual == GIB // 2
    values_a_layer = window // (1 + prefetch)
    assert full["host"] == 2 * half["host"] == LAYERS * values_a_layer * residual
    # And the output of the stack, of which the loss needs the bytes.
    for each in (half, full):
        assert each["held"] // residual == window + 1
    assert full["allocated"] <= bar * GIB
    more = full["allocated"] - half["allocated"] - (full["state"] - half["state"])
    assert more < residual // 100


def test_nothing_named_holds_every_residual(seen: Any) -> None:
    half, full = (seen["nothing named", 1, n] for n in (LAYERS // 2, LAYERS))
    more = full["held"] - half["held"]
    assert more // full["residual"] == LAYERS // 2
    assert full["host"] == 0
