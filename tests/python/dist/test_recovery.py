"""After a failed step, training goes on as if the step had been skipped."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from support.bits import assert_same_traces
from support.bombs import Bombs, Boom
from support.model import TINY, build
from support.ranks import RankPool
from support.systems import get_system
from support.training import Run, Trace, accumulate, adamw, shard, train_step

NUM_STEPS = 4
FAILING_STEP = 1
# Held only while a step runs.
TRANSIENT = (
    "gathered",
    "gather_input",
    "gradient_stream",
    "gradient_slab",
    "sharded_gradients",
)


class Session:
    """A model in training, with bombs and dropout, on one rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        torch.manual_seed(dist.get_rank())
        model = build(run.model)
        self.bombs = Bombs(model)
        self.model: Any = shard(model, run, get_system("lowtide"))
        self.optimizer = adamw(self.model)
        self.trace = Trace()

    def step(self, step: int) -> None:
        train_step(self.model, self.optimizer, self.run, step, self.trace)

    def failing_step(self, step: int) -> BaseException:
        """Runs a step that must raise; the random state is as before it."""
        state = torch.get_rng_state()
        try:
            accumulate(self.model, self.run, step, dist.get_rank())
        except (Boom, RuntimeError, MemoryError) as error:
            torch.set_rng_state(state)
            return error
        raise AssertionError(f"step {step} did not fail")

    def transient_bytes(self) -> dict[str, int]:
        import lowtide

        categories = lowtide.memory_report(self.model).categories
        return {name: categories[name].live for name in TRANSIENT}

    def states(self) -> set[str]:
        return {unit.state for unit in self.units()}

    def units(self) -> list[Any]:
        from lowtide._sharding.unit import unit_state

        states = [unit_state(m) for m in self.model.modules()]
        return [state.unit for state in states if state is not None]

    def recover(self, explicitly: bool) -> None:
        """By `abort_step`, after which nothing is left of the step, or by just
        going on."""
        import lowtide

        if not explicitly:
            return
        lowtide.abort_step(self.model)
        assert self.transient_bytes() == dict.fromkeys(TRANSIENT, 0)
        assert self.states() == {"sharded"}
        assert all(p.grad is None for p in self.model.parameters())


def train_skipping(run: Run) -> Trace:
    session = Session(run)
    for step in range(NUM_STEPS):
        if step != FAILING_STEP:
            session.step(step)
    return session.trace


def train_exploding(run: Run, place: str, when: str, explicitly: bool) -> Trace:
    session = Session(run)
    for step in range(NUM_STEPS):
        if step != FAILING_STEP:
            session.step(step)
            continue
        armed_from = run.microbatches - 1

        def arm(model: Any, last: bool) -> None:
            if last:
                session.bombs.arm(place, when)

        state = torch.get_rng_state()
        with pytest.raises(Boom, match=f"{when} of {place}"):
            accumulate(session.model, run, step, dist.get_rank(), arm)
        torch.set_rng_state(state)
        assert armed_from >= 0
        session.recover(explicitly)
    return session.trace


# Every unit of both wrappings has one: its first, last or only module.
PLACES = (
    "embed",
    "layers.0.attention_norm",
    "layers.0.w2",
    "layers.1.wq",
    "layers.1.w2",
    "norm",
    "head",
)


def explode_everywhere(run: Run, when: str) -> tuple[Trace, list[Trace]]:
    expected = train_skipping(run)
    traces = [
        train_exploding(run, place, when, explicitly=i % 2 == 0)
        for i, place in enumerate(PLACES)
    ]
    return expected, traces


@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("wrapping", ["blocks", "own_units"])
def test_exception_equals_a_skipped_step(pool_of, world_size, wrapping, when, sync):
    run = Run(
        replace(TINY, dropout=0.1),
        world_size,
        wrapping=wrapping,
        microbatches=2,
        sync=sync,
    )
    results = pool_of(world_size).run(explode_everywhere, run, when)
    expected = [trace for trace, _ in results]
    assert len(expected[0].losses) == NUM_STEPS - 1
    for i in range(len(PLACES)):
        assert_same_traces([traces[i] for _, traces in results], expected)


def device_memory() -> Any:
    from lowtide._base import memory

    return memory.device_memory(torch.device("cpu"))


def lease_points() -> list[tuple[str, str]]:
    """What a step so far leased: (category, name)."""
    from lowtide._base import memory

    ledger = memory.ledger(torch.device("cpu"))
    return [
        (category, name)
        for category in TRANSIENT
        for name, (_, peak) in sorted(ledger.by_name(category).items())
        if peak > 0
    ]


def train_out_of_memory(run: Run, point: tuple[str, str], explicitly: bool) -> Trace:
    session = Session(run)
    for step in range(NUM_STEPS):
        if step != FAILING_STEP:
            session.step(step)
            continue
        device_memory().fail_next_lease(*point)
        error = session.failing_step(step)
        assert isinstance(error, torch.OutOfMemoryError), repr(error)
        category, name = point
        assert f"of '{name}': expected " in str(error), (category, error)
        session.recover(explicitly)
    return session.trace


def fail_every_lease(
    run: Run,
) -> tuple[list[tuple[str, str]], Trace, list[Trace]]:
    import lowtide

    session = Session(run)
    lowtide.memory_report(session.model, reset_peaks=True)
    session.step(0)
    points = lease_points()
    del session
    expected = train_skipping(run)
    traces = [
        train_out_of_memory(run, point, explicitly=i % 2 == 0)
        for i, point in enumerate(points)
    ]
    return points, expected, traces


@pytest.mark.parametrize("sync", ["each", "last"])
def test_failed_allocation_equals_a_skipped_step(pool_of, world_size, sync):
    run = Run(replace(TINY, dropout=0.1), world_size, microbatches=2, sync=sync)
    results = pool_of(world_size).run(fail_every_lease, run)
    points = results[0][0]
    categories = {category for category, _ in points}
    assert categories == set(TRANSIENT) - (
        {"gradient_slab"} if sync == "each" else set()
    )
    units = {name for category, name in points if category == "gathered"}
    assert {"layers.0", "layers.1"} < units and len(units) == 3
    expected = [trace for _, trace, _ in results]
    for i in range(len(points)):
        assert_same_traces([traces[i] for _, _, traces in results], expected)


def error_without_memory() -> str:
    """Of a forward in a process that may not have the bytes of its second unit."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(8, 4096), nn.Sequential(nn.Linear(4096, 4096, bias=False))
    )
    for unit in (model[0], model[1][0], model):
        get_system("lowtide").fully_shard(unit)
    x = torch.ones(1, 8)
    model(x).sum().backward()
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (own + (16 << 20), limits[1]))
    try:
        model(x)
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return "no error"


def test_memory_that_the_system_has_not_is_a_sentence(pool_of):
    for text in pool_of(2).run(error_without_memory):
        assert text.partition("(lowtide: ")[2] == (
            f"gathered of '1.0': expected {4 * 4096**2} bytes, got no memory for them. "
            "Save fewer activations, shard over more ranks or make smaller units; "
            "lowtide.memory_report() and `lowtide plan` show what takes how much.)"
        )


def train_and_lose_a_rank(run: Run, path: Path, how: str) -> str:
    """Saves after step 0.  In step 1 the last rank leaves in the middle of
    forward; returns what the others get to hear."""
    session = Session(run)
    session.step(0)
    model_state, optimizer_state = get_state_dict(session.model, session.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    if dist.get_rank() == run.world_size - 1:
        session.bombs.arm("layers.0.w2", "forward")
    try:
        session.step(1)
    except Boom:
        if how == "dies":
            os._exit(7)
        return "boom"
    except RuntimeError as error:
        return str(error)
    return "no error"


def train_on(run: Run, path: Path | None) -> Trace:
    """Steps 1 to the end, from the checkpoint or from step 0."""
    session = Session(run)
    if path is None:
        session.step(0)
        session.trace = Trace()
    else:
        model_state, optimizer_state = get_state_dict(session.model, session.optimizer)
        content = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            session.model,
            session.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
    for step in range(1, NUM_STEPS):
        session.step(step)
    return session.trace


# The first that wants the lost rank: a collective, or what compares the ranks.
NAMES_WHAT_LACKED_A_RANK = re.compile(
    r"lowtide: "
    r"(?:(?:layers\.0|layers\.1|\w*Llama): "
    r"expected the (?:all-gather|reduce-scatter) to finish on all ranks, got '.*' "
    r"|comparing what ranks did: expected all ranks to take part in the step, got .* )"
    r"\(rank (\d) of (\d)\)\. ",
    re.DOTALL,
)


@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_left_alone_raise_and_restart(pool_of, tmp_path, world_size, how):
    run = Run(TINY, world_size)
    path = tmp_path / "ckpt"
    with RankPool(world_size, group_timeout=4.0) as pool:
        outcomes = pool.outcomes(train_and_lose_a_rank, run, path, how, timeout=60)
    *others, lost = outcomes
    assert (lost.kind, lost.value) == (
        ("value", "boom") if how == "raises" else ("died", None)
    )
    for rank, outcome in enumerate(others):
        assert outcome.kind == "value", outcome
        match = NAMES_WHAT_LACKED_A_RANK.match(outcome.value)
        assert match is not None, outcome.value
        assert match[1] == str(rank) and match[2] == str(world_size)

    pool = pool_of(world_size)
    assert_same_traces(pool.run(train_on, run, path), pool.run(train_on, run, None))
