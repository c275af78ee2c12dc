"""``lowtide.step``: what raises on one rank did not happen on any."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.stepping import StepUndone
from support.bits import assert_same_tensors
from support.bombs import Boom
from support.breaking import BreaksAt, boom, interrupt
from support.optimizers import (
    OPTIMIZERS,
    WIDE,
    compiling,
    config_of,
    everything,
    is_quantized,
)
from support.ranks import RankPool
from support.saving import backward, make

STEPS = 3


def broken_step(
    model: Any, optimizer: torch.optim.Optimizer, breaks: BreaksAt, behind: bool
) -> None:
    with lowtide.step(model, optimizer):
        with breaks:
            optimizer.step()
        if behind:
            breaks.how()


def break_a_step(
    name: str, how: Callable[[], None], at_step: int, then: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs that must be equal: of this rank right after the broken step, and in the
    end."""
    last = dist.get_rank() == dist.get_world_size() - 1
    config = config_of(name)
    calls: list[None] = []

    def run(broken: bool, at: int | None) -> tuple[dict[str, Any], int]:
        torch.manual_seed(dist.get_rank())
        model, _ = make(config=config)
        optimizer = OPTIMIZERS[name](model)
        count = 0
        for step in range(STEPS):
            backward(model, step, config)
            if step == at_step and broken:
                before = everything(model, optimizer)
                known = set(optimizer.state)
                breaks = BreaksAt(at if last else None, how)
                calls.clear()
                expected = (Boom, KeyboardInterrupt) if last else StepUndone
                with pytest.raises(expected) as raised:
                    broken_step(model, optimizer, breaks, last and at is None)
                if not last:
                    said = "Boom: an operator" if how is boom else "KeyboardInterrupt"
                    assert str(raised.value).startswith(
                        f"lowtide: step: expected all {dist.get_world_size()} ranks to "
                        f"finish the step, got on rank {dist.get_world_size() - 1}: "
                        f"'{said}' (rank {dist.get_rank()})"
                    ), raised.value
                assert set(optimizer.state) == known
                pairs.append((everything(model, optimizer), before))
                count = breaks.count
                if at is None:  # it came to its end, compiled as without the mode
                    whole = len([*model.parameters()])
                    assert len(calls) == (whole if "compiled" in name else 0)
            if step != at_step or then == "again":
                with lowtide.step(model, optimizer):
                    optimizer.step()
            optimizer.zero_grad()
        assert any(map(is_quantized, states(optimizer))) == (config is WIDE)
        return everything(model, optimizer), count

    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with compiling(name, calls):
        end, count = run(True, None)  # at the end of the step
        assert count >= 2 or not last
        expected, _ = run(False, None)
        pairs.append((end, expected))
        for at in {0, count // 2, count - 1} if last else {0, 1, 2}:
            pairs.append((run(True, at)[0], expected))
    return pairs


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


def check(results: list[list[tuple[dict[str, Any], dict[str, Any]]]]) -> None:
    for rank, pairs in enumerate(results):
        for number, (got, expected) in enumerate(pairs):
            assert_same_tensors(got, expected, f"pair {number} of rank {rank}")


@pytest.mark.parametrize("then", ["again", "skipped"])
@pytest.mark.parametrize("at_step", [0, 1])
@pytest.mark.parametrize("how", [boom, interrupt])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_broken_step_did_not_happen(pool_of, world_size, name, how, at_step, then):
    check(pool_of(world_size).run(break_a_step, name, how, at_step, then))


def steps_of_worlds(folder: str) -> list[bool]:
    """The third rank comes when the others have stepped without it."""
    rank, happened = int(os.environ["RANK"]), []
    for size in (2, 3):
        store = dist.FileStore(f"{folder}/world of {size}", size)
        if rank >= size:
            continue
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=10),
        )
        model = nn.Linear(4, 4)
        lowtide.fully_shard(model)
        optimizer = torch.optim.AdamW(lowtide.local_parameters(model))
        for _ in range(2):
            block = lowtide.step(model, optimizer)
            with block:
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            happened.append(block.happened)
        dist.destroy_process_group()
    return happened


def test_a_rank_that_joins_a_new_world_steps_with_the_others(tmp_path):
    with RankPool(3, group=False) as pool:
        first, second, third = pool.run(steps_of_worlds, str(tmp_path), timeout=60)
    assert (first, second, third) == ([True] * 4, [True] * 4, [True] * 2)
