"""A long training with everything that happens to one: nothing grows, and its bits are
those of a training to which nothing happens. Each quantity's slope catches a leak."""

from __future__ import annotations

import footprint
import pytest
import worlds
from cases.soak import run
from soak import FAULTS, LAYOUTS, LEAKS, Plan

from support.ranks import RankPool

pytestmark = [pytest.mark.slow("soak"), pytest.mark.timeout(1200)]

LONG = Plan(steps=1000)
# Leaks show in the slopes of a shorter one, to which nothing happens.
SHORT = Plan(steps=160, cycle=10, disturbed=False)


def test_nothing_grows_and_all_bits_are_those_of_steps_alone() -> None:
    ranks = run(LONG, timeout=900)
    calm = run(Plan(LONG.steps, disturbed=False), timeout=900)
    worlds = {f"world of {layout}" for layout in LAYOUTS}
    assert {*FAULTS, *worlds, "evaluation", "save"} == set(ranks[0]["happened"])
    for rank, (one, other) in enumerate(zip(ranks, calm, strict=True)):
        grown = footprint.growing(one["samples"], LONG.cycle)
        assert grown == {}, (rank, one["samples"])
        assert len(one["digests"]) == LONG.steps // LONG.cycle
        assert one["digests"] == other["digests"], f"rank {rank}"


@pytest.mark.parametrize("leak", LEAKS)
def test_the_slope_of_what_is_kept_catches_it(leak: str) -> None:
    plan = Plan(SHORT.steps, SHORT.cycle, SHORT.disturbed, leak)
    quantity, kept = LEAKS[leak]
    for one in run(plan, timeout=300):
        grown = footprint.growing(one["samples"], plan.cycle)
        assert grown[quantity] >= 0.95 * 1000 * kept, one["samples"]
        # Threads and graphs take memory, and slots are in the host's ledger.
        assert grown.keys() <= {quantity, "resident", "ledger"}, one["samples"]


WORLDS = 60
# Between two systems in the same loop; a model that stays is twice as many.
NOISE = 8 << 10


def left_by_a_world(system: str) -> list[dict[str, float]]:
    """By rank."""
    with RankPool(worlds.RANKS, group=False) as pool:
        ranks = pool.run(worlds.worlds, system, WORLDS, timeout=400)
    settled = [samples[WORLDS // 2 :] for samples in ranks]
    return [
        {name: footprint.slope([float(one[name]) for one in each]) for name in each[0]}
        for each in settled
    ]


def test_a_world_leaves_no_more_than_with_fsdp2() -> None:
    ours, theirs = left_by_a_world("lowtide"), left_by_a_world("FSDP2")
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine["heap"] < other["heap"] + NOISE, (rank, mine, other)
        for name in ("descriptors", "threads", "pinned", "ledger"):
            assert mine[name] == 0, (rank, mine)
