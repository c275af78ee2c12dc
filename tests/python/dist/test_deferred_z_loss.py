"""A program's own z-loss of deferred logits in a sharded model: losses and gradients of
the plain logits, one pass over the head, wherever the head and its loss are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.losses import defer_logits
from lowtide.losses._heads import tally_of
from support.deferred_heads import trained
from support.z_losses import APART, SHARED

VOCAB, DIM, TOKENS = 301, 24, 10
PLACES = ["own unit", "own unit, bias", "group", "resharded group", "root"]


class Net(nn.Module):
    def __init__(self, bias: bool, program: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=bias)
        self.program = program

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.head(self.norm(torch.tanh(self.embed(ids))))
        return logits if self.program is None else self.program(logits, targets)


def sharded(place: str, program: Any, dtype: torch.dtype | None) -> Any:
    torch.manual_seed(0)
    net = Net("bias" in place, program)
    policy = lowtide.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard: Any = functools.partial(lowtide.fully_shard, mp_policy=policy)
    if "unit" in place:
        shard(net.head)
    elif "group" in place:
        shard([net.norm, net.head], reshard_after_forward="resharded" in place)
    return shard(net)


def steps(
    place: str, name: str, where: str, deferred: bool, dtype: torch.dtype | None
) -> dict[str, Any]:
    program = {**SHARED, **APART}[name]
    net = sharded(place, program if where == "inside" else None, dtype)
    if deferred:
        defer_logits(net.head)

    def loss_of_step(step: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(1 + dist.get_rank() + 100 * step)
        ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=g)
        targets = torch.randint(VOCAB, (2, TOKENS // 2), generator=g)
        targets[0, 0] = -100
        loss = net(ids, targets)
        return program(loss, targets) if where == "outside" else loss

    return trained(net, loss_of_step, 3) | {"made": tally_of(net.head).made.total()}


def require_close(actual: list[Any], expected: list[Any], rtol: float) -> None:
    for mine, wanted in zip(actual, expected, strict=True):
        for one, other in zip(mine["numbers"], wanted["numbers"], strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", [*SHARED, "before"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("place", PLACES)
def test_losses_and_parameters_of_the_plain_logits(pool_of, place, where, name):
    expected = pool_of(2).run(steps, place, name, where, False, None)
    actual = pool_of(2).run(steps, place, name, where, True, None)
    # The gradient of streamed rows is taken once: this loss makes the logits.
    makes = place == "own unit" and name in ("before", "alone")
    for rank in actual:
        assert bool(rank["made"]) == makes
        for said in rank["says"]:
            assert "logsumexp (not of the tokens of a cross entropy before" in said
    require_close(actual, expected, 1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_in_bf16(pool_of, place):
    expected = pool_of(2).run(steps, place, "olmo", "outside", False, torch.bfloat16)
    actual = pool_of(2).run(steps, place, "olmo", "outside", True, torch.bfloat16)
    assert all(not rank["says"] for rank in actual)
    require_close(actual, expected, 2**-7)


@pytest.mark.parametrize("place", PLACES[1:])
def test_other_tokens_take_a_pass_of_their_own(pool_of, place):
    name = "of_other_tokens"
    expected = pool_of(2).run(steps, place, name, "outside", False, None)
    actual = pool_of(2).run(steps, place, name, "outside", True, None)
    assert all(not rank["says"] for rank in actual)
    require_close(actual, expected, 1e-5)


def test_other_tokens_of_streamed_rows_are_refused(pool_of):
    outcomes = pool_of(2).outcomes(
        steps, "own unit", "of_other_tokens", "outside", True, None
    )
    for outcome in outcomes:
        assert outcome.kind == "error"
        assert "'head.weight': expected" in outcome.error
