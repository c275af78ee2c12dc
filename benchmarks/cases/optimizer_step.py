"""Host time of an optimizer step: DTensors beside plain local shards."""

from __future__ import annotations

import json
from typing import Any

from case import Case, Row, rows_of
from launch import run

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
    output = run("optimizer_time.py", str(NUM_STEPS), timeout=600)
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
`programs/optimizer_time.py`: torch's `fake` process group of 8 ranks, a Llama of 16
blocks and tensors of a few elements. AdamW on plain tensors of the shards' sizes, on
one for each unit's, on FSDP2's and lowtide's `model.parameters()`, and on
`lowtide.local_parameters(model)` take turns in one process; a figure is the median of
40 steps of the thread's CPU time, by the model's parameters. DTensor calls: what a mode
sees in a step. *bar*: what we set out to reach.

A sharded parameter's gradient and states are looked up for each step, since a program
may have put others there: as much again as torch takes for plain tensors.
One tensor a unit is not built. Its shards lie side by side, and so do its gradients;
states would have to, too, and whatever takes them one by one (sleep, states on the
host, steps that are undone, checkpoints) would meet parts of one tensor. It would spare
7 us of host time a parameter, 2 ms in a step of Llama 8B, which takes a second.""",
    run=measure,
)
