"""What one rank keeps of the step before says nothing of this one."""

from __future__ import annotations

from collections.abc import Callable

from dist.test_random_steps import Steps
from support.random_steps import Pass, Setup
from support.ranks import RankPool


def test_a_graph_of_the_step_before_hides_no_difference(
    pool_of: Callable[[int], RankPool],
) -> None:
    """Rank 0 used the scale of block 0 and keeps that loss; now rank 1 uses it, alone:
    its chunk must not leave before block 1's backward begins."""
    before = ((True, True, True), (False, True, True))
    now = ((False, False, False), (True, False, False))
    kept = Pass(95, scaled=before, order=(0,), kept=(True, False))
    run = Pass(46, scaled=now, order=(2, 2, 1, 0), aside=0)
    steps = type("Kept", (Steps,), {"pool": pool_of(2), "compared": True})()
    steps.start(setup=Setup(budget=1024))
    for each in (kept, run):
        steps.microbatch(kept=(False, False), run=each, sync=(True,) * 4)
    steps.teardown()
