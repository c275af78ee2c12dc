"""Case 2 at the report's own size, on the simulated device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from case import Case, Row, rows_of
from launch import run

from cases.case2_residual_offload import OURS, STOCK

NAME = "case2_full_scale"
GIB = 1 << 30
# [16, 4096, 2048] in fp32 per device, of batch 64 and sequence 8192 on a mesh of 4 x 2.
ROWS, WIDTH, LAYERS, WORLD = 16 * 4096, 2048, 32, 8
OFFLOADING = ("offload residual", "offload both")
# Without the residuals the published run has 4.27 GiB, or 3.75 with `hidden` offloaded.
REST_GIB, RESIDUAL_GIB, TOLERANCE_GIB = 4.27, 0.5, 0.5
BOTH_GIB = (4.25, 4.75)

Seen = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    world: int
    prefetch: int

    def __str__(self) -> str:
        held = f"sharded over {self.world}" if self.world > 1 else "replicated"
        return f"parameters {held}, p = {self.prefetch}"


SETTINGS = tuple(Setting(world, p) for world in (WORLD, 1) for p in (1, 2))


def measure() -> list[Row]:
    rows = [row for setting in SETTINGS for row in peaks(setting)]
    return rows + list(slopes(SETTINGS[0])) + list(batch(SETTINGS[0]))


def simulate(
    system: str, setting: Setting, layers: int = LAYERS, batch: int = 1
) -> Seen:
    numbers = (layers, batch * ROWS, WIDTH, setting.prefetch, setting.world)
    seen = json.loads(
        run("residual_simulated.py", system, *map(str, numbers), timeout=600)
    )
    assert isinstance(seen, dict)
    return seen


def peaks(setting: Setting) -> Iterator[Row]:
    row = rows_of(NAME)
    for system in (*OURS, *STOCK) if setting.prefetch == 1 else OFFLOADING:
        seen = simulate(system, setting)
        for quantity, key in (
            ("device, peak allocated", "allocated"),
            ("device, peak reserved", "reserved"),
            ("of it parameters and gradients", "state"),
            ("host", "host"),
        ):
            yield row(
                system, f"{setting}: {quantity}", gib(seen[key]), "GiB", "simulated"
            )
        if system in OFFLOADING:
            yield from bars(system, setting, seen["allocated"] / GIB)


def bars(system: str, setting: Setting, device: float) -> Iterator[Row]:
    row = rows_of(NAME)
    least, most = BOTH_GIB
    if system == "offload residual":
        expected = REST_GIB + RESIDUAL_GIB * (1 + setting.prefetch)
        least, most = expected - TOLERANCE_GIB, expected + TOLERANCE_GIB
    elif setting.prefetch > 1:
        return
    for what, value, kind in (
        ("expected at least", round(least, 2), "arithmetic"),
        ("expected at most", round(most, 2), "arithmetic"),
    ):
        yield row(system, f"{setting}: {what}", value, "GiB", kind)
    quantity = f"{setting}: allocated, at most as expected"
    yield row(system, quantity, device <= most, "", "simulated")


def slopes(setting: Setting) -> Iterator[Row]:
    row = rows_of(NAME)
    for system in OURS:
        full, half = (simulate(system, setting, n) for n in (LAYERS, LAYERS // 2))
        for key, place in (("held", "device, held for backward"), ("host", "host")):
            more = (full[key] - half[key]) / (LAYERS - LAYERS // 2)
            value = round(more / full["residual"], 3)
            quantity = f"{place}: residuals more a layer"
            yield row(system, quantity, value, "", "simulated")


def batch(setting: Setting) -> Iterator[Row]:
    """Of what the peak grows by when the batch is four times as large."""
    row = rows_of(NAME)
    for system in ("nothing named", *OFFLOADING):
        for layers in (LAYERS // 2, LAYERS):
            once, large = (simulate(system, setting, layers, b) for b in (1, 4))
            grown = (large["allocated"] - once["allocated"]) / (3 * once["residual"])
            quantity = f"four times the batch, {layers} layers: peak grows threefold by"
            yield row(system, quantity, round(grown, 2), "residuals", "simulated")


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)


CASE = Case(
    name=NAME,
    describe="The same at the report's size (xla 17541), simulated.",
    how=f"""\
`programs/residual_simulated.py`, one process a figure: the blocks of
case2_residual_offload, {LAYERS} of them, width {WIDTH}, fp32, the residual of
[16, 4096, {WIDTH}] that each of the report's {WORLD} devices has ({RESIDUAL_GIB} GiB),
between a small embedding and a mean of squares, on `lowtide.phantom` in meta mode; the
third step. Parameters sharded by lowtide over the {WORLD} devices, or replicated. The
report does not give its model: it holds {REST_GIB} GiB beside the residuals, and what
is expected is that much and {RESIDUAL_GIB} GiB (1 + p), +- {TOLERANCE_GIB}; with both
names {BOTH_GIB[0]} to {BOTH_GIB[1]}. Ours has other layers and holds less or more: see
*of it parameters and gradients*, which are all there at the end of backward. Host
memory is counted, not modelled.""",
    run=measure,
)
