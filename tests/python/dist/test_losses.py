"""A head that is a unit of its own, gathered as a whole, computes its loss without
logits: the gradients are those of the plain head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide._sharding.unit import unit_state
from lowtide.losses import linear_cross_entropy

VOCAB, DIM = 37, 16


class LossHead(nn.Linear):
    """A head whose forward is the loss: gathered and resharded like any unit."""

    chunking = "vocabulary"

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return linear_cross_entropy(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            chunking=self.chunking,
            token_chunk=4,
        )


class Model(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, DIM), nn.Tanh())
        self.head = head


class CallsItsHead(Model):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.body(x), targets)


class UnshardsItsHead(Model):
    """The head stays an ordinary nn.Linear."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(x)
        self.head.unshard()
        return linear_cross_entropy(
            hidden, self.head, targets, chunking="tokens", token_chunk=4
        )


def batch(rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(6, 8, generator=g), torch.randint(VOCAB, (6,), generator=g)


def build(way: str) -> Model:
    torch.manual_seed(0)
    if way == "unshard":
        return UnshardsItsHead(nn.Linear(DIM, VOCAB, bias=False))
    head = LossHead(DIM, VOCAB, bias=False)
    head.chunking = way
    return CallsItsHead(head)


def plain_gradients(way: str) -> dict[str, Tensor]:
    """Averaged over ranks."""
    model = build(way)
    losses = []
    for rank in range(dist.get_world_size()):
        x, targets = batch(rank)
        logits = F.linear(model.body(x), model.head.weight)
        losses.append(F.cross_entropy(logits, targets))
    torch.stack(losses).mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def train(way: str, reshard: bool) -> dict[str, Any]:
    """The second of two steps."""
    model = build(way)
    lowtide.fully_shard(model.head, reshard_after_forward=reshard)
    lowtide.fully_shard(model)
    state = unit_state(model.head)
    assert state is not None
    counts: dict[str, int] = {}
    for _ in range(2):
        model.zero_grad()
        for group in (state.groups.gather, state.groups.reduce):
            group.reset_counters()
        loss = model(*batch(dist.get_rank()))
        counts["forward"] = state.groups.gather.counters["all-gather"][0]
        loss.backward()
    assert state.unit is not None
    counts["step"] = state.groups.gather.counters["all-gather"][0]
    return {
        "gathers": counts,
        "state": state.unit.state,
        "gradients": {
            name: p.grad.full_tensor() for name, p in model.named_parameters()
        },
        "expected": plain_gradients(way),
    }


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("way", ["vocabulary", "tokens", "unshard"])
def test_a_unit_gathered_as_a_whole(
    way: str, reshard: bool, pool_of: Callable[[int], Any]
) -> None:
    for seen in pool_of(2).run(train, way, reshard):
        assert seen["state"] == "sharded"
        torch.testing.assert_close(seen["gradients"], seen["expected"])
        # The root and the head; in backward the root is there already.
        assert seen["gathers"]["forward"] == 2
        if way == "unshard" or not reshard:
            assert seen["gathers"]["step"] == 2, "the head is gathered once"
