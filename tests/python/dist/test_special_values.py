"""Values that a careless accumulation, zero-fill or padding would change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.bits import assert_follows_rule
from support.model import TINY
from support.systems import get_system
from support.training import Run, Trace, train_sharded

ROWS = 5  # uneven over 2, 3 and 4 ranks


class Weighted(nn.Module):
    """The gradient of every weight is its input, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.names = ("before", "middle", "after")
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.ones(ROWS, 3)))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [
                (getattr(self, name) * x).sum()
                for name, x in zip(self.names, inputs, strict=True)
            ]
        ).sum()


def make(system_name: str) -> Any:
    system = get_system(system_name)
    policy = system.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    module = Weighted()
    system.fully_shard(module, mp_policy=policy)
    system.prepare(module)
    return module


def full_grads(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() for n, p in module.named_parameters()}


def accumulate_values(
    system: str, values: list[float], sync: str
) -> dict[str, torch.Tensor]:
    """Gradients after one microbatch per value, each weight's gradient that."""
    module = make(system)
    for i, value in enumerate(values):
        module.set_requires_gradient_sync(sync == "each" or i == len(values) - 1)
        x = torch.full((ROWS, 3), value)
        module(x, x, x).backward()
    return full_grads(module)


@pytest.mark.parametrize("sync", ["each", "last"])
def test_small_gradient_survives_between_large_ones(pool_of, system, world_size, sync):
    in_bf16 = torch.tensor(256.0).bfloat16() + 1 - 256
    assert in_bf16.item() == 0.0
    for grads in pool_of(world_size).run(
        accumulate_values, system, [256.0, 1.0, -256.0], sync
    ):
        for grad in grads.values():
            assert grad.dtype == torch.float32
            assert grad.tolist() == [[1.0] * 3] * ROWS


@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_negative_zero_survives(pool_of, system, world_size, microbatches, sync):
    for grads in pool_of(world_size).run(
        accumulate_values, system, [-0.0] * microbatches, sync
    ):
        for grad in grads.values():
            assert (grad == 0).all() and torch.signbit(grad).all()


def negative_zero_weights(system: str) -> list[bool]:
    """Whether -0.0 stays so in the shard and in the gathered parameter."""
    module = make(system)
    with torch.no_grad():
        module.middle.mul_(-0.0)
    facts = [bool(torch.signbit(module.middle.to_local()).all())]
    module.unshard()
    facts.append(bool(torch.signbit(module.middle).all()))
    facts.append(bool((module.after == 1).all()))
    return facts


def test_negative_zero_weights_survive_the_gather(pool_of, system, world_size):
    for facts in pool_of(world_size).run(negative_zero_weights, system):
        assert facts == [True] * 3


def one_bad_row(system: str, bad: float) -> dict[str, torch.Tensor]:
    """Rank 0's gradient of one row of one parameter is `bad`, all else is 2."""
    module = make(system)
    clean = torch.full((ROWS, 3), 2.0)
    dirty = clean.clone()
    if dist.get_rank() == 0:
        dirty[3] = bad
    module(clean, dirty, clean).backward()
    return full_grads(module)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradient_stays_in_its_row(pool_of, system, world_size, bad):
    for grads in pool_of(world_size).run(one_bad_row, system, bad):
        assert grads["before"].eq(2).all() and grads["after"].eq(2).all()
        finite = grads["middle"].isfinite().all(1)
        assert finite.tolist() == [True, True, True, False, True]
        assert grads["middle"][finite].eq(2).all()


def train_poisoned(run: Run) -> Trace:
    """Every buffer lowtide leases starts as NaN and is NaN once given back."""
    from lowtide._base.memory import device_memory

    memory = device_memory(torch.device("cpu"))
    memory.set_poison(True)
    try:
        return train_sharded("lowtide", run)
    finally:
        memory.set_poison(False)


@pytest.mark.parametrize(("microbatches", "sync"), [(1, "each"), (3, "last")])
@pytest.mark.parametrize("frozen", [(), ("layers.0.*", "*.wk.weight")])
def test_poisoned_buffers_leak_nowhere(
    pool_of, rule, world_size, frozen, microbatches, sync
):
    # Uneven rows, empty shards and frozen parameters: all kinds of padding.
    config = replace(TINY, frozen=frozen)
    run = Run(config, world_size, microbatches=microbatches, sync=sync)
    assert_follows_rule(pool_of(world_size).run(train_poisoned, run), rule(run))
