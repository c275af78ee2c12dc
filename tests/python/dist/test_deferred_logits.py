"""``defer_logits`` in a sharded model: the same bits as ``linear_cross_entropy`` called
by hand, wherever the head and its loss are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.losses import defer_logits, linear_cross_entropy
from lowtide.losses._deferred_logits import DeferredLogits
from support.bits import same_bits

VOCAB, DIM, TOKENS = 301, 24, 10


class Net(nn.Module):
    """Embedding, layer, norm, head; forward gives logits or the loss."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=bias)
        self.last = "logits"

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        h = self.norm(torch.tanh(self.layer(self.embed(ids))))
        if self.last == "hidden":
            return h
        if self.last == "by hand":
            return linear_cross_entropy(h, self.head, targets)
        logits = self.head(h)
        return logits if self.last == "logits" else loss_of(logits, targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1 + dist.get_rank() + 100 * step)
    ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=g)
    targets = torch.randint(VOCAB, (2, TOKENS // 2), generator=g)
    targets[0, 0] = -100
    return ids, targets


def sharded(place: str, bias: bool, dtype: torch.dtype | None, early: bool) -> Any:
    torch.manual_seed(0)
    net = Net(bias)
    if early:
        defer_logits(net.head)
    policy = lowtide.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard: Any = lambda unit, **how: lowtide.fully_shard(unit, mp_policy=policy, **how)  # noqa: E731
    for unit in (net.embed, net.layer):
        shard(unit)
    if place == "own unit":
        shard(net.head)
    elif place == "group":
        shard([net.norm, net.head], reshard_after_forward=False)
    elif place == "resharded group":
        shard([net.norm, net.head], reshard_after_forward=True)
    shard(net, reshard_after_forward=True if place == "resharded root" else None)
    return net


def steps(
    place: str, form: str, bias: bool, dtype: torch.dtype | None, early: bool = False
) -> dict[str, Any]:
    """``form``: what is deferred or not, and whether the loss is in the forward."""
    deferred, where = form.split()
    net = sharded(place, bias, dtype, early)
    if deferred == "deferred" and not early:
        defer_logits(net.head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, stayed = [], []
    for step in range(3):
        ids, targets = batch(step)
        if deferred == "hand":
            net.last = "by hand" if where == "inside" else "hidden"
            loss = net(ids, targets)
            if where == "outside":
                loss = linear_cross_entropy(loss, net.head, targets)
        else:
            net.last = "loss" if where == "inside" else "logits"
            loss = net(ids, targets)
            if where == "outside":
                stayed.append(isinstance(loss, DeferredLogits))
                loss = loss_of(loss, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    full = [parameter.full_tensor() for parameter in net.parameters()]
    return {"numbers": [*losses, *full], "stayed": stayed}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("place", ["own unit", "group", "root"])
def test_bits_of_the_loss_called_by_hand(pool_of, place, where, dtype):
    expected = pool_of(2).run(steps, place, f"hand {where}", False, dtype)
    actual = pool_of(2).run(steps, place, f"deferred {where}", False, dtype)
    for mine, wanted in zip(actual, expected, strict=True):
        assert all(mine["stayed"])
        for one, other in zip(mine["numbers"], wanted["numbers"], strict=True):
            assert same_bits(one, other)
