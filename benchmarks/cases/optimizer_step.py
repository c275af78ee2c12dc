"""Host time of an optimizer step: DTensors beside plain local shards."""

from __future__ import annotations

import json
from typing import Any

from case import Case, Row, rows_of
from launch import run

from lowtide.phantom.dry.launch import Machine

NAME = "optimizer_step"
NUM_STEPS = 40
BAR = 8  # us, what we set out to reach with fused AdamW
SYSTEMS = {
    "plain": "plain tensors",
    "units": "plain tensors, one a unit",
    "fsdp2": "fsdp2",
    "lowtide": "lowtide",
    "local_parameters": "lowtide, local_parameters",
}


def measure() -> list[Row]:
    output = run(
        *("optimizer_time.py", str(NUM_STEPS)),
        machine=Machine(world=8),
        timeout=600,
    )
    return rows(json.loads(output))


def rows(found: dict[str, dict[str, dict[str, Any]]]) -> list[Row]:
    row = rows_of(NAME)
    result = []
    for variant, kinds in found.items():
        for kind, system in SYSTEMS.items():
            quantity = f"optimizer step, {variant} AdamW, a parameter"
            us = round(kinds[kind]["us"], 1)
            result.append(row(system, quantity, us, "us", "measured"))
            if (variant, kind) == ("fused", "lowtide"):
                result.append(row("bar", quantity, BAR, "us", "arithmetic"))
            quantity = f"DTensor calls of a step, {variant} AdamW"
            calls = kinds[kind]["DTensor calls"]
            result.append(row(system, quantity, calls, "", "measured"))
    return result


CASE = Case(
    name=NAME,
    describe="Host time of an optimizer step on local shards, beside DTensors.",
    how="""\
`programs/optimizer_time.py`, dry: torch's CUDA build over the driver that computes
nothing, rank 0 of 8, a Llama of 16 blocks, expandable segments. AdamW on plain tensors
of the shards' sizes, on one for each unit's, on FSDP2's and lowtide's
`model.parameters()`, and on `lowtide.local_parameters(model)` take turns in one
process; a figure is the median of 40 steps of the thread's CPU time, by the model's
parameters. DTensor calls: what a mode sees in a step. *bar*: what we set out to reach.

Where segments expand a unit's parameters step as one tensor, whose states are made as
one ([optimizers](optimizers.md)). What is left above *plain tensors, one a unit* is
looking: a program may have put another gradient or state in a parameter's place.""",
    run=measure,
)
