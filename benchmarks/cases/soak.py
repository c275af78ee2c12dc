"""A training of 10,000 steps with everything that happens to one: what grows."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from case import Case, Row, rows_of
from footprint import BOUNDS, growth
from soak import FAULTS, LAYOUTS, RANKS, Plan, soak

from support.ranks import RankPool

NAME = "soak"
STEPS = 10_000
UNITS = {"resident": "KiB", "pinned": "B", "ledger": "B"}
HELD = {
    "resident": "resident memory",
    "descriptors": "open descriptors",
    "threads": "threads",
    "pinned": "pinned bytes",
    "ledger": "bytes in the ledgers",
}


def run(plan: Plan, timeout: float) -> list[dict[str, Any]]:
    """By rank."""
    with RankPool(RANKS, group=False) as pool, tempfile.TemporaryDirectory() as folder:
        return pool.run(soak, plan, folder, timeout=timeout)


def measure() -> list[Row]:
    plan = Plan(STEPS)
    return rows(
        plan,
        run(plan, timeout=4 * 3600),
        run(Plan(STEPS, disturbed=False), timeout=4 * 3600),
    )


def rows(
    plan: Plan, ranks: Sequence[dict[str, Any]], calm: Sequence[dict[str, Any]]
) -> list[Row]:
    row = rows_of(NAME)
    result = []
    for quantity in BOUNDS:
        unit = UNITS.get(quantity, "")
        scale = 1024 if unit == "KiB" else 1
        for system, of in {"lowtide": ranks, "steps alone": calm}.items():
            grown = max(growth(r["samples"], quantity, plan.cycle) for r in of)
            held = max(r["samples"][-1][quantity] for r in of) / scale
            name = HELD[quantity]
            result += [
                row(system, f"{name}, at the end", round(held), unit, "measured"),
                row(
                    system,
                    f"{name}, more after 1,000 steps",
                    round(grown / scale, 1),
                    unit,
                    "measured",
                ),
            ]
    happened = ranks[0]["happened"]
    counts = {
        "steps": plan.steps,
        "steps that failed and were tried again": sum(
            happened[name] for name in FAULTS
        ),
        "worlds": sum(happened[f"world of {layout}"] for layout in LAYOUTS),
        "saves between worlds and within": happened["save"]
        + sum(happened[f"world of {layout}"] for layout in LAYOUTS)
        - 1,
        "evaluations": happened["evaluation"],
    }
    for name, count in counts.items():
        result.append(row("lowtide", name, count, "", "measured"))
    equal = [r["digests"] for r in ranks] == [r["digests"] for r in calm]
    name = "all bits, every 100 steps, equal those of steps alone"
    result.append(row("lowtide", name, equal, "", "measured"))
    return result


CASE = Case(
    name=NAME,
    describe="What 10,000 steps leave behind, with all that happens to a training.",
    how="""\
`programs/soak.py` on four gloo ranks, two of them a tensor- and sequence-parallel
axis: accumulation with and without sync, an offloaded input, gathers that are done
again and that are saved, evaluations, saves in the foreground and in the background,
eleven kinds of faults (on all ranks or on one, in `lowtide.step` or caught without,
each tried again), and worlds of two shards, one rank and two replicas a part: between
them the processes save, destroy their process groups, meet anew and load. Every 100
steps, where all ranks stand alike, a rank collects garbage, gives the heap's unused
pages back (`malloc_trim`) and is looked at. *More after 1,000 steps*: by the slope
(Theil-Sen) of the second half of the samples, of the rank where it is steepest. *Steps
alone*: the same batches on two shards throughout, and nothing else. What is compared
with it, every 100 steps and on every rank, are parameters and optimizer states. One
rank alone has the bits of two where it takes two microbatches: it adds the same two
gradients. Gradients are summed, not averaged, and every shard is whole vectors of the
processor. The layer that runs twice computes in fp32, since FSDP2 of torch 2.15 rounds
the sum of what several uses give, or does not, by what is there to add to; in the
figures below it still computed in bf16.

torch 2.11 itself keeps something of every DTensor operator (pytorch issues 178276 and
181761). So the optimizer has `local_parameters` and nothing is clipped on these CPUs,
and each world still leaves some ten kilobytes, as FSDP2's does in the same loop
([worlds](#worlds)): that is most of what resident memory grows by.""",
    run=measure,
    only_by_name="takes an hour",
)
