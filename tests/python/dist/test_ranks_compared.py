"""Ranks whose data differs issue the same collectives in one order; ranks that run
something else hear so before anything of it reaches ``.grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowtide import fully_shard
from lowtide._state import groups
from support.layers import Blocks, data
from support.ranks import RankPool


def sharded() -> Any:
    torch.manual_seed(0)
    model = Blocks()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def differing(what: str) -> str:
    """What is raised on this rank in a step in which rank 1 does it."""
    model = sharded()
    model(data(0)).sum().backward()
    model.zero_grad()
    if dist.get_rank() == 1:
        if what == "order":
            model.calls = (0, 2, 1)
        elif what == "frozen":
            model.layers[1].weight.requires_grad_(False)
        elif what == "factor":
            model.layers[1].set_gradient_divide_factor(7.0)
    with pytest.raises(RuntimeError, match="every rank to run the same") as error:
        model(data(1)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.calls = (0, 1, 2)
    model.layers[1].weight.requires_grad_(True)
    model.layers[1].set_gradient_divide_factor(2.0)
    model(data(2)).sum().backward()  # the ranks go on together
    assert all(p.grad is not None for p in model.parameters())
    return str(error.value)


@pytest.mark.parametrize("what", ["order", "frozen", "factor"])
def test_ranks_that_differ_later_are_named(pool_of, what):
    for rank, text in enumerate(pool_of(2).run(differing, what)):
        assert f"(rank {rank} of 2)" in text
        assert "on rank 1" in text
        assert "unit 'layers." in text
        assert {"order": "of", "frozen": "trainable", "factor": "settings"}[
            what
        ] in text


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor, unused: int) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != unused:
                x = torch.tanh(layer(x))
        return x


class Towers(nn.Module):
    """Blocks of wide layers, one of which a rank may leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, unused: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, unused)
        return x


ROWS = ((8, 4000), (4000, 8), (1, 2000))


def train_on_different_rows(budget: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = Towers()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rank = dist.get_rank()
    for step, rows in enumerate(ROWS):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(rows[rank], 64)
        unused = step if rank == 1 else -1
        model(x, unused).square().mean().backward()
        if step == 0:
            model.blocks[0]._get_fsdp_state().root.gradient_budget = budget
    return [p.grad.full_tensor() for p in model.parameters()]


def rule_on_different_rows() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Towers()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for step, rows in enumerate(ROWS):
        by_rank = []
        for rank in range(2):
            model.zero_grad()
            torch.manual_seed(10 * step + rank)
            x = torch.randn(rows[rank], 64)
            model(x, step if rank == 1 else -1).square().mean().backward()
            by_rank.append([p.grad for p in model.parameters()])
        for sum_, *grads in zip(total, *by_rank, strict=True):
            mean = torch.zeros_like(sum_)
            for grad in grads:
                mean += grad if grad is not None else 0
            sum_ += mean / 2
    return total


@pytest.fixture(scope="module")
def shared_pool():
    with RankPool(2, env={"LOWTIDE_COMMUNICATORS": "shared"}) as pool:
        yield pool


@pytest.mark.parametrize("budget", [1, 64 << 20])
def test_ranks_with_different_rows_share_one_communicator(shared_pool, budget):
    """A second order would mix gathers and reductions up, or hang."""
    expected = shared_pool.run(rule_on_different_rows)[0]
    for grads in shared_pool.run(train_on_different_rows, budget, timeout=60):
        for grad, want in zip(grads, expected, strict=True):
            assert torch.equal(grad, want)


def test_an_unknown_way_to_compare_is_refused(monkeypatch):
    monkeypatch.setenv("LOWTIDE_COMPARE_RANKS", "sometimes")
    with pytest.raises(ValueError, match="LOWTIDE_COMPARE_RANKS: expected on or off"):
        groups._host_group(None, torch.device("cpu"))
