"""Peak live bytes of forward and backward, lowtide beside FSDP2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from case import Case, Row, rows_of
from launch import run

NAME = "live_bytes"
SYSTEMS = ("lowtide", "fsdp2")
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    dtypes: str
    world_size: int
    num_layers: int
    size: str = "small"

    def __str__(self) -> str:
        size = "" if self.size == "small" else f" {self.size}"
        return f"{self.dtypes}, {self.world_size} ranks, {self.num_layers}{size} blocks"


SETTINGS = (
    *(Setting("fp32", 2, num_layers) for num_layers in (8, 16)),
    *(Setting("bf16/fp32", 2, num_layers) for num_layers in (8, 16)),
    *(Setting("bf16/fp32", 8, num_layers) for num_layers in (8, 16)),
    Setting("bf16/fp32", 8, 4, "large"),
    Setting("float8/fp32", 8, 8),
)


def measure() -> list[Row]:
    rows: list[Row] = []
    for setting in SETTINGS:
        rows += rows_for(setting, {name: record(name, setting) for name in SYSTEMS})
    return rows


def record(system: str, setting: Setting) -> dict[str, Any]:
    return json.loads(
        run(
            "step_memory.py",
            system,
            str(setting.world_size),
            setting.dtypes,
            setting.size,
            str(setting.num_layers),
            timeout=900,
        )
    )


def rows_for(setting: Setting, seen: dict[str, dict[str, Any]]) -> list[Row]:
    row = rows_of(NAME)
    ours, theirs = seen["lowtide"], seen["fsdp2"]
    held = {name: value for name, value in ours["at_peak"].items() if value}
    breakdown = ", ".join(f"{name} {mib(value)}" for name, value in held.items())
    note = f"MiB at this peak: {breakdown}"
    rows = [
        row(
            "lowtide",
            f"peak live bytes, {setting}",
            mib(ours["peak"]),
            "MiB",
            "measured",
            note,
        ),
        row(
            "fsdp2",
            f"peak live bytes, {setting}",
            mib(theirs["peak"]),
            "MiB",
            "measured",
        ),
    ]
    for system in SYSTEMS:
        # Sharded gradients, the same for both, are what is left at the end.
        above = mib(seen[system]["peak"] - seen[system]["after"])
        quantity = f"of it gone after backward, {setting}"
        rows.append(row(system, quantity, above, "MiB", "measured"))
    quantity = f"lowtide's transient, {setting}"
    rows += [
        row("lowtide", quantity, mib(ours["transient"]), "MiB", "measured"),
        row("plan", quantity, mib(ours["planned"]), "MiB", "arithmetic"),
    ]
    return rows


def mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 2)


CASE = Case(
    name=NAME,
    describe="Peak live bytes of forward and backward, beside FSDP2.",
    how="""\
`programs/step_memory.py`, one process a figure: Llama blocks of 1.57 M parameters (6
MiB in fp32; *large*: 80 MiB in bf16), one sequence of 32 tokens, reduction in every
backward, rank 0. c10's allocations are recorded by `AllocationTimeline` for both
systems alike, on torch's `fake` process group: it has no threads whose releases a
recorder would miss, so the figures repeat to the byte, and there is no computing with
real gradients of other ranks. The peak is the third step's, above the sharded
parameters, sharded gradients included. *float8*: the blocks' matrices are a tensor
subclass with all-gather extensions, one byte an element and a scale a row, which its
layer converts to bf16. lowtide's *transient* is what must not grow
with depth: gathered, gather_input and gradient_stream, each at its own peak.""",
    run=measure,
)
