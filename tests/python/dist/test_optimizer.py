"""Torch's own optimizers and clipping see what they see under FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.bits import assert_same_traces
from support.model import TINY, build
from support.systems import get_system
from support.training import (
    Run,
    Trace,
    accumulate,
    local_grads,
    local_params,
    shard,
    train_sharded,
)

ADAMW = {
    "for_loop": (("foreach", False),),
    "foreach": (("foreach", True),),
    "fused": (("fused", True),),
}


@pytest.mark.parametrize("implementation", ADAMW)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_adamw_and_clipping_equal_fsdp2(pool_of, world_size, implementation, clip):
    run = Run(TINY, world_size, clip=clip, adamw=ADAMW[implementation])
    pool = pool_of(world_size)
    ours, theirs = (pool.run(train_sharded, name, run) for name in ("lowtide", "fsdp2"))
    assert_same_traces(ours, theirs)
    if clip is not None:
        # Every rank sees one norm, and it is large enough to clip.
        norms = {tuple(trace.norms) for trace in theirs}
        assert len(norms) == 1 and min(norms.pop()) > clip


def train_sgd_keeping_grads(system: str, run: Run) -> Trace:
    """Momentum; gradients zeroed in place instead of released."""
    model = shard(build(run.model), run, get_system(system))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = Trace()
    for step in range(run.num_steps):
        trace.losses.append(accumulate(model, run, step, dist.get_rank()))
        trace.grads.append(local_grads(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        trace.params.append(local_params(model))
    return trace


def test_gradients_zeroed_in_place_equal_fsdp2(pool_of, world_size):
    run = Run(TINY, world_size, microbatches=2)
    pool = pool_of(world_size)
    ours, theirs = (
        pool.run(train_sgd_keeping_grads, name, run) for name in ("lowtide", "fsdp2")
    )
    assert_same_traces(ours, theirs)


def train_without_zeroing(system: str, run: Run) -> Trace:
    """Every step's gradients are added to those of the steps before."""
    model = shard(build(run.model), run, get_system(system))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace()
    for step in range(run.num_steps):
        trace.losses.append(accumulate(model, run, step, dist.get_rank()))
        trace.grads.append(local_grads(model))
        optimizer.step()
        trace.params.append(local_params(model))
    return trace


@pytest.mark.parametrize("sync", ["each", "last"])
def test_gradients_not_released_accumulate_as_in_fsdp2(pool_of, world_size, sync):
    run = Run(TINY, world_size, microbatches=2, sync=sync)
    pool = pool_of(world_size)
    ours, theirs = (
        pool.run(train_without_zeroing, name, run) for name in ("lowtide", "fsdp2")
    )
    assert_same_traces(ours, theirs)


def hooks_and_grads(system: str, run: Run) -> list[tuple[str, bool]]:
    """Post-accumulate hooks in the order they ran, and whether each saw the
    sharded parameter with the gradient that is there at the end."""
    model: Any = shard(build(run.model), run, get_system(system))
    seen: list[tuple[str, torch.Tensor]] = []
    names = {id(p): n for n, p in model.named_parameters()}

    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen.append((names[id(p)], p.grad.to_local().clone()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    accumulate(model, run, 0, dist.get_rank())
    grads = local_grads(model)
    return sorted((name, torch.equal(grad, grads[name])) for name, grad in seen)


def test_post_accumulate_hooks_see_sharded_gradients(pool_of, system, world_size):
    run = Run(replace(TINY, num_layers=1), world_size)
    names = sorted(name for name, _ in build(run.model).named_parameters())
    for seen in pool_of(world_size).run(hooks_and_grads, system, run):
        assert seen == [(name, True) for name in names]
