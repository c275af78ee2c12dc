"""What a model and its optimizer lend of a GPU while they sleep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from case import Case, Row, rows_of
from launch import run

from cases.experts import gib
from lowtide.phantom.dry.launch import Machine

NAME = "sleeping"
RANKS, WIDTH, LAYERS, STEPS = 8, 4096, 16, 2
ALLOCATORS = ("default", "expandable")
MOMENTS = (
    "between two microbatches",
    "behind the backward",
    "behind the optimizer's step",
)
STATES = ("awake", "asleep", "woken")


def rows_on(allocator: str) -> Iterator[Row]:
    row = rows_of(NAME)
    conf = f"expandable_segments:{allocator == 'expandable'}"
    arguments = map(str, (RANKS, WIDTH, LAYERS, STEPS))
    said = run(
        *("sleep_and_wake.py", *arguments),
        machine=Machine(gpu="h100", world=RANKS),
        variables={"PYTORCH_CUDA_ALLOC_CONF": conf},
        timeout=600,
    )
    last = json.loads(said)["naps"][-len(MOMENTS) :]  # with the optimizer's states
    for moment, nap in zip(MOMENTS, last, strict=True):
        where = f"{moment}, {allocator} segments"
        for state in STATES:
            of_state, quantity = nap[state], f"reserved, {where}: {state}"
            note = f"allocated {gib(of_state['allocated'])}"
            value = gib(of_state["reserved"])
            yield row("lowtide", quantity, value, "GiB", "simulated", note)
        value = gib(nap["asleep"]["page-locked"])
        quantity = f"page-locked on the host, {where}"
        yield row("lowtide", quantity, value, "GiB", "simulated")


def rows_of_allocator(allocator: str) -> list[Row]:
    return list(rows_on(allocator))


CASE = Case(
    name=NAME,
    describe="What a model and its optimizer lend of a GPU while they sleep.",
    how="""\
`programs/sleep_and_wake.py`: `lowtide.sleep(model, optimizer)` and `lowtide.wake` at
three moments of a step, rank 0 of 8, on the [driver that computes
nothing](design/phantom.md): 16 blocks of 134 million parameters, bf16 compute, fp32
reduction, fused AdamW, two microbatches of which the first is not reduced; the second
step. What stays asleep are the program's own tensors, and pages of the allocator around
them. What a GPU took for it, and its bits, are in [gpu_check.md](gpu_check.md).""",
    run=lambda: [row for one in ALLOCATORS for row in rows_on(one)],
    parts={f"{one} segments": partial(rows_of_allocator, one) for one in ALLOCATORS},
)
