"""CPU time that sharding adds to a unit, forward and backward."""

from __future__ import annotations

import json

from case import Case, Row, rows_of
from launch import run

NAME = "host_cost"
NUM_STEPS = 40
NUM_RUNS = 5
AIM = 0.15
LONGER = (
    "the aim is on instructions, see host_instructions, where the part spent inside "
    "the fake process group is told apart"
)


Times = dict[str, dict[str, float]]  # us per unit by system and phase


def measure() -> list[Row]:
    arguments = ("host_time.py", str(NUM_STEPS))
    return rows([json.loads(run(*arguments, timeout=900)) for _ in range(NUM_RUNS)])


def rows(runs: list[Times]) -> list[Row]:
    """The run in the middle by lowtide's share, and how far the others are."""
    row = rows_of(NAME)
    by_share = sorted(runs, key=share)
    medians = by_share[len(runs) // 2]
    plain = medians["plain"]
    added = {
        system: {phase: medians[system][phase] - plain[phase] for phase in plain}
        for system in ("lowtide", "fsdp2")
    }
    result = []
    for system, phases in added.items():
        phases["both"] = sum(phases.values())
        for phase, value in phases.items():
            quantity = {
                "forward": "host time per unit, forward",
                "backward": "host time per unit, backward",
                "both": "host time per unit",
            }[phase]
            result.append(row(system, quantity, round(value, 1), "us", "measured"))
    low, high = share(by_share[0]), share(by_share[-1])
    note = f"{len(runs)} runs: {low:.3f} to {high:.3f}"
    if share(medians) > AIM:
        note = f"{note}; {LONGER}"
    value = round(share(medians), 3)
    result.append(row("lowtide", "share of FSDP2's", value, "", "measured", note))
    result.append(row("aim", "share of FSDP2's", AIM, "", "arithmetic"))
    for phase, value in plain.items():
        quantity = f"unsharded {phase} of a block, for scale"
        result.append(row("plain", quantity, round(value, 1), "us", "measured"))
    return result


def share(times: Times) -> float:
    """lowtide's added time in FSDP2's."""
    plain, ours, theirs = (
        sum(times[name].values()) for name in ("plain", "lowtide", "fsdp2")
    )
    return (ours - plain) / (theirs - plain)


CASE = Case(
    name=NAME,
    describe="Host time per 9-parameter unit, beside FSDP2.",
    how="""\
`programs/host_time.py`: torch's `fake` process group of 8 ranks, a Llama of 32 blocks
(9 parameters each) and tensors of a few elements, bf16 compute, fp32 reduction. The
unsharded model, FSDP2 and lowtide take turns in one process; a figure is the median of
40 steps of the thread's CPU time, less the unsharded model's, over 33 units; of five
processes the one with the middle share. The fake
group's own time is in it: of each unit's buffer that is gathered it makes a copy per
rank, for both systems alike.""",
    run=measure,
)
