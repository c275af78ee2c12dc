"""CPU time that sharding adds to Llama 8B's blocks on torch's ProcessGroupNCCL."""

from __future__ import annotations

import json

from case import Case, Row, rows_of
from launch import run

from lowtide.phantom.dry.launch import Machine

NAME = "nccl_host_cost"
NUM_LAYERS, NUM_STEPS, NUM_RUNS = 8, 30, 5
AIM_SHARE, AIM_CALL = 0.15, 40.0
NO_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
# How the program is started, and in which environment.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "flight recorder": ((), {}),
    "no flight recorder": ((), NO_RECORDER),
    "beside a busy thread": (("spin",), {}),
}

Figures = dict[str, dict[str, float]]  # by system


def one_run(way: str) -> Figures:
    words, variables = WAYS[way]
    arguments = ("nccl_host_time.py", str(NUM_LAYERS), str(NUM_STEPS), *words)
    # Bytes are only counted there: room for all three models at once.
    machine = Machine(memory=200 << 30)
    printed = run(
        *arguments, machine=machine, observed=False, variables=variables, timeout=900
    )
    return json.loads(printed)


def measure() -> list[Row]:
    return [
        row
        for way in WAYS
        for row in rows(way, [one_run(way) for _ in range(NUM_RUNS)])
    ]


def rows(way: str, runs: list[Figures]) -> list[Row]:
    """Of the run in the middle by lowtide's share."""
    row = rows_of(NAME)
    by_share = sorted(runs, key=share)
    middle = by_share[len(runs) // 2]
    result = []
    for system in ("lowtide", "fsdp2"):
        added = (middle[system]["cpu"] - middle["plain"]["cpu"]) / (NUM_LAYERS + 1)
        name = f"host time per unit, {way}"
        result.append(row(system, name, round(added, 1), "us", "measured"))
    low, high = share(by_share[0]), share(by_share[-1])
    note = f"{len(runs)} runs: {low:.3f} to {high:.3f}"
    name = f"share of FSDP2's, {way}"
    value = round(share(middle), 3)
    result.append(row("lowtide", name, value, "", "measured", note))
    result.append(row("aim", name, AIM_SHARE, "", "arithmetic"))
    name = f"host time per collective, {way}"
    for system in ("lowtide", "fsdp2"):
        per_call = added_time(middle, system) / middle[system]["collectives"]
        result.append(row(system, name, round(per_call, 1), "us", "measured"))
    result.append(row("aim", name, AIM_CALL, "us", "arithmetic"))
    return result


def added_time(figures: Figures, system: str) -> float:
    return figures[system]["cpu"] - figures["plain"]["cpu"]


def share(figures: Figures) -> float:
    return added_time(figures, "lowtide") / added_time(figures, "fsdp2")


CASE = Case(
    name=NAME,
    describe="Host time of Llama 8B's units on torch's NCCL, beside FSDP2.",
    how="""\
`programs/nccl_host_time.py`: blocks of a Llama 8B (4096 wide, 8 of 32; bf16 compute,
fp32 reduction) as rank 0 of 8 on torch's own ProcessGroupNCCL, over the driver that
computes nothing, whose calls are in the time. The unsharded model, FSDP2 and lowtide
take turns in one process; a figure is the lower quartile of 30 forwards and backwards,
CPU time of the two threads that issue them, less the unsharded model's; of five
processes the one with the middle share. A collective is a gather of a unit or a
reduction of a chunk, of which lowtide has more; the time of a collective is all that
sharding adds. torch's flight recorder is on by default (2,000 entries). A busy
thread is a loop of Python's, which takes the interpreter for 5 ms at a time. *aim*:
what we set out to reach.

Beside a busy thread the aims are missed: most calls of torch give the interpreter up
and have it back 5 ms later, the unsharded model's, too, and each wait is CPU time.
Holding the interpreter over a list's calls, which torch's recorder takes for each
tensor, changed nothing.""",
    run=measure,
    headlines=("host time per unit, flight recorder",),
)
