"""Random training steps on two ranks, beside the rule in a single process.

A program is a sequence of operations that users mix: microbatches with and without
sync, forwards whose backward comes later, twice or never, ranks with other numbers of
rows and other unused parameters, units that run in another order or in part, frozen
parameters, cleared gradients, gathered units, exceptions, ranks that disagree. After
each of them every output, parameter and gradient has the rule's bits.

LOWTIDE_RANDOM_SEED and LOWTIDE_RANDOM_PROGRAMS look further than a test run does;
LOWTIDE_RANDOM_SHRINK=1 makes a program that fails short.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.random_steps import BLOCKS, RANKS, Pass, Setup, perform, start
from support.ranks import RankPool

PROGRAMS = int(os.environ.get("LOWTIDE_RANDOM_PROGRAMS", "8"))
SEED = int(os.environ.get("LOWTIDE_RANDOM_SEED", "16"))
OPERATIONS = 14
# Shrinking a program that failed takes minutes.
PHASES = (hypothesis.Phase.generate,) + (
    (hypothesis.Phase.shrink,) if "LOWTIDE_RANDOM_SHRINK" in os.environ else ()
)
MOST_OPEN = 3

setups = st.builds(
    Setup,
    wrap=st.sampled_from(("blocks", "group", "root")),
    compute=st.sampled_from((torch.float32, torch.bfloat16)),
    reshard=st.booleans(),
    budget=st.sampled_from((None, 1 << 10)),
    embedding=st.booleans(),
)
flags = st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS).map(tuple)
passes = st.builds(
    Pass,
    seed=st.integers(0, 99),
    rows=st.tuples(*[st.integers(0, 4)] * RANKS),
    scaled=st.tuples(*[flags] * RANKS),
    order=st.lists(st.sampled_from(range(BLOCKS)), max_size=BLOCKS + 1).map(tuple),
    head=st.booleans(),
    checkpointed=st.booleans(),
)
syncs = st.one_of(
    st.sampled_from(((True,) * (BLOCKS + 1), (False,) * (BLOCKS + 1))),
    st.tuples(*[st.booleans()] * (BLOCKS + 1)),
)
names = st.sampled_from(
    ("stem.weight", "blocks.0.up.weight", "blocks.1.scale", "norm.weight")
)


class Steps(RuleBasedStateMachine):
    pool: RankPool

    def __init__(self) -> None:
        super().__init__()
        self.open = 0

    def both(self, operation: str, *arguments: Any) -> None:
        found = self.pool.run(perform, operation, *arguments, timeout=60)
        assert len(set(found)) == 1
        self.open = found[0]

    @initialize(setup=setups)
    def start(self, setup: Setup) -> None:
        self.setup = setup
        self.pool.run(start, setup)

    @precondition(lambda self: self.open < MOST_OPEN)
    @rule(run=passes)
    def forward(self, run: Pass) -> None:
        self.both("forward", run)

    @rule(run=passes)
    def evaluate(self, run: Pass) -> None:
        self.both("evaluate", run)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, MOST_OPEN - 1), sync=syncs, retain=st.booleans())
    def backward(self, which: int, sync: tuple[bool, ...], retain: bool) -> None:
        if self.setup.wrap == "root":
            sync = (sync[0],) * len(sync)
        self.both("backward", which % self.open, sync, retain)

    @rule(run=passes, sync=syncs)
    def microbatch(self, run: Pass, sync: tuple[bool, ...]) -> None:
        if self.open < MOST_OPEN:
            self.forward(run)
            self.backward(self.open - 1, sync, False)

    @precondition(lambda self: not self.open)
    @rule()
    def step(self) -> None:
        self.both("step")

    @rule(what=st.sampled_from(("optimizer", "model", "block")), to_none=st.booleans())
    def zero_grad(self, what: str, to_none: bool) -> None:
        self.both("zero_grad", what, to_none)

    @precondition(lambda self: not self.open)
    @rule(name=names, frozen=st.booleans())
    def freeze(self, name: str, frozen: bool) -> None:
        self.both("freeze", name, frozen)

    @rule(number=st.integers(0, BLOCKS - 1))
    def unshard(self, number: int) -> None:
        self.both("unshard", number)

    @rule(
        run=passes,
        number=st.integers(0, BLOCKS - 1),
        when=st.sampled_from(("forward", "backward")),
    )
    def fail(self, run: Pass, number: int, when: str) -> None:
        if number in run.order:
            self.both("fail", run, number, when)

    @precondition(lambda self: self.setup.wrap == "blocks")
    @rule(run=passes)
    def disagree(self, run: Pass) -> None:
        self.both("disagree", run)

    @precondition(lambda self: not self.open)
    @rule()
    def load(self) -> None:
        self.both("load")

    @invariant()
    def no_more_losses_than_asked_for(self) -> None:
        assert self.open <= MOST_OPEN


@pytest.mark.timeout(900)
def test_random_steps_equal_the_rule() -> None:
    print(f"LOWTIDE_RANDOM_SEED={SEED}")
    with RankPool(RANKS, group_timeout=20.0) as pool:
        machine = type("Steps", (Steps,), {"pool": pool})
        seeded = hypothesis.seed(SEED)(machine)
        run_state_machine_as_test(
            seeded,
            settings=hypothesis.settings(
                max_examples=PROGRAMS,
                stateful_step_count=OPERATIONS,
                deadline=None,
                database=None,
                phases=PHASES,
                print_blob=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            ),
        )
