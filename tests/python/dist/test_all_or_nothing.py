"""Steps of accelerate's, transformers', Lightning's and torchtitan's own loops that
happen on all ranks, or on none: asked for in the program, or by `lowtide run`."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import lowtide
from lowtide.integrations import all_or_nothing
from lowtide.integrations.session import Options, Session
from lowtide.stepping import StepUndone
from support import loops, titan_on_cpus
from support.bits import assert_same_tensors
from support.bombs import Boom
from support.breaking import BreaksAt, boom, interrupt
from support.optimizers import local
from support.ranks import RankPool

SHARD = "frameworks"
STEPS, FAILING = 4, 2
AT = 9  # the operator of the optimizer's that breaks


def no_memory() -> None:
    raise torch.OutOfMemoryError("no 3 bytes")


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {"generator": torch.get_rng_state()}
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            found[f"{i}"] = local(p).clone()
            found[f"{i}.grad"] = None if p.grad is None else local(p.grad).clone()
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{i}.{key}"] = local(value).clone()
    return found


class Watched:
    """AdamW's steps: the last rank's of number ``FAILING`` breaks off once, in the
    middle or where the backward before it would end."""

    def __init__(
        self, where: str, how: Callable[[], None] | None, everywhere: bool
    ) -> None:
        last = dist.get_rank() == dist.get_world_size() - 1
        self.how = how if last or everywhere else None
        self.where = where
        self.number = 0
        self.before: dict[str, Any] = {}
        self.optimizer: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        theirs = torch.optim.AdamW.step
        watched = self

        @functools.wraps(theirs)
        def step(self: Any, closure: Any = None) -> Any:
            failing = watched.number == FAILING
            watched.number += not failing or bool(watched.before)
            if failing and not watched.before:
                watched.before = state_of(self)
                watched.number += watched.how is None
            how = None
            if failing and watched.where == "optimizer":
                how, watched.how = watched.how, None
            watched.optimizer = self

            def outside() -> Any:
                with _disable_current_modes():
                    return closure()

            with BreaksAt(None if how is None else AT, how):
                return theirs(self, None if closure is None else outside)

        backward = torch.Tensor.backward

        def broken_backward(tensor: Any, *args: Any, **kw: Any) -> None:
            backward(tensor, *args, **kw)
            if self.number == FAILING and self.where == "backward" and self.how:
                how, self.how = self.how, None
                how()

        with (
            mock.patch.object(torch.optim.AdamW, "step", step),
            mock.patch.object(torch.Tensor, "backward", broken_backward),
        ):
            yield


def train(
    framework: str,
    folder: Path,
    in_program: bool,
    where: str = "",
    how: Callable[[], None] | None = None,
    accumulate: int = 1,
) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]:
    """What was raised, the state then, the one before the step that broke off, and what
    was counted."""
    # There the others are in a collective already: Lightning clips in the closure, and
    # torchtitan's loss has another chunk's backward from 0.3 on.
    everywhere = where == "backward" and (
        framework == "lightning"
        or (framework == "torchtitan" and titan_on_cpus.HAS_CONFIGS)
    )
    watched, raised = Watched(where, how, everywhere), ""
    all_or_nothing.counts = all_or_nothing.Counts()
    session = None if in_program else Session(Options(all_or_nothing=True))
    try:
        with watched.watching():
            loops.run(framework, folder, in_program, STEPS, accumulate)
    except (Boom, KeyboardInterrupt, StepUndone, torch.OutOfMemoryError) as error:
        raised = f"{type(error).__name__}: {error}"
    except SystemExit as error:  # Lightning's end of an interrupt
        raised = f"{type(error.__context__).__name__}: {error.__context__}"
    finally:
        if session is not None:
            session.end()
    counts = vars(all_or_nothing.counts)
    return raised, state_of(watched.optimizer), watched.before, counts


@pytest.fixture(scope="module")
def pool_for() -> Iterator[Callable[[str], RankPool]]:
    """Of their own: accelerate changes environment variables, torchtitan is told that
    there are CPUs alone."""
    with RankPool(2) as one, RankPool(2) as other:
        yield lambda framework: other if framework == "torchtitan" else one


QUICK = {("accelerate", boom, True), ("lightning", interrupt, False)}


@pytest.mark.parametrize(
    ("framework", "how", "in_program"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow(SHARD))
        for case in itertools.product(loops.ALL, (boom, interrupt), (True, False))
    ],
)
def test_a_step_that_breaks_off_is_undone(
    pool_for, tmp_path, framework, how, in_program
):
    pool = pool_for(framework)
    found = pool.run(train, framework, tmp_path, in_program, "optimizer", how)
    for rank, (raised, state, before, counts) in enumerate(found):
        kind = "StepUndone" if rank == 0 else "Boom" if how is boom else "KeyboardI"
        assert raised.startswith(kind), raised
        assert any(".exp_avg" in name for name in before)
        assert_same_tensors(state, before, f"rank {rank}")
        assert counts == {"steps": FAILING, "undone": 1, "again": 0}


# The loop's own code holds the backward in accelerate; Lightning calls what it
# accumulates outside of the optimizer's step.
REFUSED = [
    *(("optimizer", framework, 1) for framework in loops.ALL),
    *(("backward", framework, 1) for framework in loops.ALL[1:]),
    ("optimizer", "lightning", 2),
    ("optimizer", "transformers", 2),
    ("backward", "transformers", 2),
]
QUICK_CASE = ("backward", "transformers", 1)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == QUICK_CASE else pytest.mark.slow(SHARD))
        for case in REFUSED
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_what_finds_no_memory_runs_again_to_the_same_bits(pool_for, tmp_path, case):
    where, framework, accumulate = case
    pool = pool_for(framework)
    given = (framework, tmp_path / "unbroken", False)
    unbroken = pool.run(train, *given, accumulate=accumulate)
    given = (framework, tmp_path / "broken", False)
    found = pool.run(train, *given, where, no_memory, accumulate)
    for rank, (raised, state, _, counts) in enumerate(found):
        assert raised == ""
        assert_same_tensors(state, unbroken[rank][1], f"rank {rank}")
        assert unbroken[rank][3] == {"steps": STEPS, "undone": 0, "again": 0}
        assert counts == {"steps": STEPS, "undone": 1, "again": 1}


def step_within_a_microbatch() -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    lowtide.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    all_or_nothing.guard(optimizer)
    before = state_of(optimizer)

    def microbatch(trainer: Any) -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    trainer = types.SimpleNamespace(model=model)
    with pytest.raises(NotImplementedError) as raised:
        all_or_nothing._guarded_microbatch(microbatch)(trainer)
    assert_same_tensors(state_of(optimizer), before, "undone")
    return str(raised.value)


def test_an_optimizer_within_the_backward_is_refused(pool_of):
    said = pool_of(2).run(step_within_a_microbatch)
    assert set(said) == {
        "lowtide: all or nothing: expected SGD to step behind the backward, got a step "
        "within it, which could not be undone. Turn the optimizer in the backward off, "
        "or leave all-or-nothing steps out."
    }


def lives_of_optimizers() -> tuple[bool, bool]:
    """Whether one that is guarded goes with its last name, and one that is nobody's
    steps as it did."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    (p,) = optimizer.param_groups[0]["params"]
    all_or_nothing.guard(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    p.sum().backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    gc.enable()
    return gone() is None, bool((p == 0).all())


def test_a_guard_keeps_no_optimizer_alive(pool_of):
    assert pool_of(2).run(lives_of_optimizers) == [(True, True)] * 2
