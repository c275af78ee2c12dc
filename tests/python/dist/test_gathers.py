"""Each unit is gathered once in forward and once in backward, and only if needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide._sharding.unit import unit_state
from support.model import ModelConfig, batch, build, loss_fn
from support.systems import get_system
from support.training import Run, shard

CONFIG = ModelConfig(num_layers=3)


def gathers_per_phase(run: Run, grad: bool = True) -> dict[str, Any]:
    """All-gather calls of a forward and of its backward, after a first step, and the
    units' states after each."""
    model = shard(build(run.model), run, get_system("lowtide"))
    ids, targets = batch(run.model, 0, 0, dist.get_rank())
    loss_fn(model(ids), targets).backward()
    state = unit_state(model)
    assert state is not None

    def calls() -> int:
        return state.groups.gather.counters["all-gather"][0]

    def states() -> set[str]:
        found = (unit_state(module) for module in model.modules())
        return {s.unit.state for s in found if s is not None and s.unit is not None}

    start = calls()
    with torch.set_grad_enabled(grad):
        loss = loss_fn(model(ids), targets)
    forward, after_forward = calls() - start, states()
    if grad:
        loss.backward()
    return {
        "forward": forward,
        "after_forward": after_forward,
        "backward": calls() - start - forward,
        "after_backward": states(),
    }


def test_blocks_are_gathered_again_in_backward_the_root_is_not(
    pool_of: Callable[[int], Any],
) -> None:
    run = Run(CONFIG, world_size=2)
    for seen in pool_of(2).run(gathers_per_phase, run):
        assert (seen["forward"], seen["backward"]) == (4, 3)
        assert seen["after_forward"] == {"sharded", "unsharded"}  # the root stays
        assert seen["after_backward"] == {"sharded"}


def test_embedding_of_its_own_is_not_gathered_in_backward(
    pool_of: Callable[[int], Any],
) -> None:
    # embed, head, three blocks, and a root with the last norm.
    run = Run(CONFIG, world_size=2, wrapping="own_units")
    for seen in pool_of(2).run(gathers_per_phase, run):
        assert (seen["forward"], seen["backward"]) == (6, 4)


def test_kept_parameters_are_not_gathered_in_backward(
    pool_of: Callable[[int], Any],
) -> None:
    run = Run(CONFIG, world_size=2, reshard_after_forward=False)
    for seen in pool_of(2).run(gathers_per_phase, run):
        assert (seen["forward"], seen["backward"]) == (4, 0)
        assert seen["after_backward"] == {"sharded"}


@pytest.mark.parametrize("wrapping", ["blocks", "own_units"])
def test_forward_without_grad_gathers_each_unit_once(
    wrapping: str, pool_of: Callable[[int], Any]
) -> None:
    run = Run(CONFIG, world_size=2, wrapping=wrapping)
    for seen in pool_of(2).run(gathers_per_phase, run, grad=False):
        assert seen["forward"] == {"blocks": 4, "own_units": 6}[wrapping]
        assert seen["backward"] == 0
