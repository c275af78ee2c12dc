"""Allocations of a steady step beyond those of the unsharded model."""

from __future__ import annotations

import json

from case import Case, Row, rows_of
from launch import run

NAME = "allocations"
DEPTHS = (8, 16)


def measure() -> list[Row]:
    rows: list[Row] = []
    for depth in DEPTHS:
        seen = json.loads(run("step_allocations.py", str(depth), timeout=300))
        rows += rows_for(depth, seen)
    return rows


def rows_for(depth: int, seen: dict[str, dict[str, int]]) -> list[Row]:
    """An allocation and a lease are two events each: begin and end."""
    row = rows_of(NAME)
    rows = []
    for system in ("lowtide", "fsdp2"):
        added = (seen[system]["events"] - seen["plain"]["events"]) // 2
        leases = seen[system]["leases"]
        figures = {
            f"allocations a step beyond the model's, {depth} blocks": added,
            f"of these not leased buffers, {depth} blocks": added - leases,
        }
        rows += [
            row(system, quantity, value, "", "measured")
            for quantity, value in figures.items()
        ]
    return rows


CASE = Case(
    name=NAME,
    describe="Allocations of a steady step, beside FSDP2.",
    how="""\
`programs/step_allocations.py`: c10's allocations in the fourth forward and backward of
the models of `host_cost`, less the unsharded model's. Leased buffers are those the
ledger counts: gathered parameters, their inputs, the gradient ring, sharded gradients.
FSDP2 leases nothing.""",
    run=measure,
    headlines=(f"allocations a step beyond the model's, {DEPTHS[-1]} blocks",),
)
