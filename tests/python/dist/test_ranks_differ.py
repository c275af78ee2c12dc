"""Ranks that use the parameters of a unit differently, which FSDP2 mixes or hangs on:
the bits of all batches on one process. Ranks that shard units in another order: its
own bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.layers import NUM_STEPS, Blocks, data, sgd, train, wrap
from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
)
from support.reference import average
from support.systems import get_system


class Choice(nn.Module):
    """Equal and unequal layers, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.wide = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


def choose(orders: tuple[tuple[int, ...], ...], units: bool) -> Record:
    """Rank r calls the layers in orders[r], and from the first again."""
    system = get_system("lowtide")
    torch.manual_seed(0)
    model: Any = Choice()
    model = wrap(system, model, model.layers if units else [])
    record = Recorder()
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        order = orders[dist.get_rank() % len(orders)]
        model(data(step), order).pow(2).sum().backward()
        for name, p in model.named_parameters():
            record.add(name, p.grad.full_tensor() if p.grad is not None else None)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            record.add(name, p.full_tensor())
    return record.values


def choose_by_rule(orders: tuple[tuple[int, ...], ...], num_ranks: int) -> Record:
    """All ranks' batches one after the other, gradients averaged."""
    torch.manual_seed(0)
    model = Choice()
    record = Recorder()
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        by_rank = []
        for rank in range(num_ranks):
            order = orders[rank % len(orders)]
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(3, 5, generator=generator)
            model.zero_grad()
            model(x, order).pow(2).sum().backward()
            by_rank.append([p.grad for p in model.parameters()])
        for (name, p), *grads in zip(model.named_parameters(), *by_rank, strict=True):
            p.grad = average(grads)
            record.add(name, p.grad)
        optimizer.step()
        for name, p in model.named_parameters():
            record.add(name, p)
    return record.values


ORDERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "unused_on_one_rank": ((0, 1, 2), (0, 2)),
    "another_on_each_rank": ((0,), (1, 2)),
    "another_order_of_completion": ((0, 1, 2), (2, 1, 0)),
    "unused_on_all_ranks": ((0, 2), (2, 0)),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("orders", ORDERS)
def test_ranks_may_use_a_unit_differently(pool_of, orders, num_ranks):
    """One unit; where each layer is its own, ranks must run them alike."""
    by_rank = pool_of(num_ranks).run(choose, ORDERS[orders], False)
    expected = pool_of(1).run(choose_by_rule, ORDERS[orders], num_ranks)[0]
    for record in by_rank:
        assert_same_records(record, expected)
    left = [name for name, value in expected[:8] if value is None]
    unused = ["layers.1.weight", "layers.1.bias"] if "all" in orders else []
    assert left == [*unused, "wide.weight", "wide.bias"]


def sharded_in_an_order_of_its_own(system_name: str) -> Record:
    """As XTuner does, whose ranks draw the order each by its number."""
    system = get_system(system_name)
    torch.manual_seed(0)
    model: Any = Blocks()
    rank = dist.get_rank()
    wrap(system, model, [model.layers[(rank - i) % 3] for i in range(3)])
    for before, after in itertools.pairwise(model.layers):
        before.set_modules_to_forward_prefetch([after])
    record = Recorder()
    train(model, record, lambda step: model(data(step)).pow(2).sum())
    return record.values


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_may_shard_units_in_an_order_of_their_own(pool_of, num_ranks):
    assert_trains_as_fsdp2(pool_of(num_ranks), sharded_in_an_order_of_its_own)
