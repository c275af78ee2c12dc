"""Random training steps on two ranks, beside the rule in a single process.

A program is a sequence of operations that users mix: microbatches with and without
sync, forwards whose backward comes later, twice or never, gradients of gradients, ranks
with other numbers of rows, other unused parameters, other hooks, other inputs that want
gradients and other graphs that they keep, units that run in another order, in part or
beside the others, a head with a backward for each chunk, frozen parameters, cleared
gradients, gathered units, weights kept too long, exceptions, ranks that disagree,
tensors that say themselves how they travel, a zero-bubble schedule, parameters that a
checkpoint's tensors replace. After each of them every output, parameter and gradient
has the rule's bits, and every rank has asked the same of its communicators, in one
order over all of them.

LOWTIDE_RANDOM_SEED and LOWTIDE_RANDOM_PROGRAMS look further than a test run does;
LOWTIDE_RANDOM_SHRINK=1 makes a program that fails short.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.random_steps import (
    BLOCKS,
    MICROBATCHES,
    RANKS,
    CallLog,
    Operation,
    Pass,
    Setup,
    perform,
)
from support.ranks import RankPool

PROGRAMS = int(os.environ.get("LOWTIDE_RANDOM_PROGRAMS", "16"))
SEED = int(os.environ.get("LOWTIDE_RANDOM_SEED", "16"))
OPERATIONS = 20
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
    stem=st.sampled_from(("embedding", "linear", "rows")),
    replicas=st.booleans(),
    two_meshes=st.booleans(),
    nested=st.booleans(),
    extended=st.booleans(),
)
by_rank = st.tuples(*[st.booleans()] * RANKS)
flags = st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS).map(tuple)
passes = st.builds(
    Pass,
    seed=st.integers(0, 99),
    rows=st.tuples(*[st.integers(0, 4)] * RANKS),
    scaled=st.tuples(*[flags] * RANKS),
    order=st.lists(st.sampled_from(range(BLOCKS)), max_size=BLOCKS + 1).map(tuple),
    aside=st.sampled_from((None, *range(BLOCKS))),
    head=st.booleans(),
    checkpointed=st.booleans(),
    chunks=st.integers(0, 2),
    penalty=st.booleans(),
    wanted=by_rank,
    kept=by_rank,
)
syncs = st.one_of(
    st.sampled_from(((True,) * (BLOCKS + 1), (False,) * (BLOCKS + 1))),
    st.tuples(*[st.booleans()] * (BLOCKS + 1)),
)
names = st.sampled_from(
    ("stem.weight", "blocks.0.up.weight", "blocks.1.scale", "norm.weight")
)
numbers = st.integers(0, BLOCKS - 1)


class Steps(RuleBasedStateMachine):
    """Collects a program, which the ranks run as a whole."""

    pool: RankPool
    compared = True  # LOWTIDE_COMPARE_RANKS: without, nobody hears of ranks that differ
    offloaded = False  # with CPUOffloadPolicy

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.open = 0

    def then(self, operation: str, *arguments: Any) -> None:
        self.operations.append((operation, arguments))

    def suited(self, run: Pass) -> Pass:
        """To the setup: who calls the head behind the model's forward made it part of
        a group."""
        return run if self.setup.wrap == "group" else replace(run, chunks=0)

    @initialize(setup=setups)
    def start(self, setup: Setup) -> None:
        self.setup = replace(setup, offload=self.offloaded)

    @precondition(lambda self: self.open < MOST_OPEN)
    @rule(run=passes)
    def forward(self, run: Pass) -> None:
        self.then("forward", self.suited(run))
        self.open += 1

    @rule(run=passes)
    def evaluate(self, run: Pass) -> None:
        self.then("evaluate", self.suited(run))

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, MOST_OPEN - 1),
        sync=syncs,
        retain=st.booleans(),
        kept=by_rank,
    )
    def backward(
        self, which: int, sync: tuple[bool, ...], retain: bool, kept: tuple[bool, ...]
    ) -> None:
        if self.setup.wrap == "root":
            sync = (sync[0],) * len(sync)
        self.then("backward", which % self.open, sync, retain, kept)
        self.open -= 0 if retain else 1

    @precondition(lambda self: self.open < MOST_OPEN)
    @rule(run=passes, sync=syncs, kept=by_rank)
    def microbatch(
        self, run: Pass, sync: tuple[bool, ...], kept: tuple[bool, ...]
    ) -> None:
        self.forward(run)
        self.backward(self.open - 1, sync, False, kept)

    @precondition(lambda self: self.setup.wrap == "group")
    @rule(
        run=passes,
        syncs=st.lists(syncs, min_size=2, max_size=4),
        together=st.booleans(),
        partly=st.booleans(),
    )
    def chunked(
        self, run: Pass, syncs: list[tuple[bool, ...]], together: bool, partly: bool
    ) -> None:
        run = replace(run, chunks=len(syncs) - 1, penalty=False)
        self.then("chunked", run, syncs, together, partly)

    @precondition(lambda self: not self.open)
    @rule()
    def step(self) -> None:
        self.then("step")

    @rule(what=st.sampled_from(("optimizer", "model", "block")), to_none=st.booleans())
    def zero_grad(self, what: str, to_none: bool) -> None:
        self.then("zero_grad", what, to_none)

    @precondition(lambda self: not self.open)
    @rule(name=names, frozen=st.booleans())
    def freeze(self, name: str, frozen: bool) -> None:
        self.then("freeze", name, frozen)

    @rule(number=numbers)
    def unshard(self, number: int) -> None:
        self.then("unshard", number)

    @rule(run=passes, number=numbers)
    def peek(self, run: Pass, number: int) -> None:
        if number in run.order:
            self.then("peek", self.suited(run), number)

    @rule(name=names, rank=st.integers(0, RANKS - 1))
    def listen(self, name: str, rank: int) -> None:
        self.then("listen", name, rank)

    @rule(run=passes, number=numbers, when=st.sampled_from(("forward", "backward")))
    def fail(self, run: Pass, number: int, when: str) -> None:
        if number in run.order:
            self.then("fail", self.suited(run), number, when)
            self.open = 0

    @precondition(lambda self: self.compared and self.setup.wrap != "root")
    @rule(run=passes, what=st.sampled_from(("order", "frozen", "factor")))
    def disagree(self, run: Pass, what: str) -> None:
        of_one_size = self.setup.wrap == "blocks"
        if what != "order" or of_one_size:
            self.then("disagree", self.suited(run), what)
            self.open = 0

    @precondition(lambda self: not self.open)
    @rule(assign=st.booleans())
    def load(self, assign: bool) -> None:
        self.then("load", assign)

    @precondition(lambda self: not self.open and self.setup.pipelines)
    @rule(run=passes)
    def zero_bubble(self, run: Pass) -> None:
        """torch runs each node once: no block twice, none in recompute."""
        plain = {
            "rows": (MICROBATCHES,) * RANKS,
            "order": tuple(dict.fromkeys(run.order)),
            "checkpointed": False,
            "aside": None,
            "chunks": 0,
            "penalty": False,
            "wanted": (False,) * RANKS,
        }
        self.then("zero_bubble", replace(run, **plain))

    def teardown(self) -> None:
        if self.operations:
            ranks = self.pool.run(perform, self.setup, self.operations, timeout=60)
            self.require_one_order(ranks)

    def require_one_order(self, ranks: list[list[CallLog]]) -> None:
        for (operation, _), *logs in zip(self.operations, *ranks, strict=True):
            if operation != "disagree":
                assert all(log == logs[0] for log in logs), (operation, logs)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("compare", "offloaded"),
    [
        ("on", False),
        pytest.param("off", False, marks=pytest.mark.slow),
        pytest.param("on", True, marks=pytest.mark.slow),
    ],
    ids=["on", "off", "offloaded"],
)
def test_random_steps_equal_the_rule(compare: str, offloaded: bool) -> None:
    print(f"LOWTIDE_RANDOM_SEED={SEED}")
    env = {"TORCH_FR_BUFFER_SIZE": "4000", "LOWTIDE_COMPARE_RANKS": compare}
    with RankPool(RANKS, group_timeout=20.0, env=env) as pool:
        mode = {"pool": pool, "compared": compare == "on", "offloaded": offloaded}
        machine = type("Steps", (Steps,), mode)
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
