"""``linear_cross_entropy`` with a head that lowtide shards: its rows come and its
gradient leaves block by block, or it is gathered once; either way the ranks get the
average of what one process computes in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import lowtide
from lowtide._sharding.unit import unit_state
from lowtide.losses import linear_cross_entropy, stream_rows
from lowtide.losses._autograd import loss_of_rows
from lowtide.losses._objective import Objective
from support.bits import difference, same_bits
from support.losses import StridedRows
from support.reference import average

VOCAB, DIM, TOKENS = 301, 24, 10  # 301 divides by none of 2, 3, 4
MEAN = Objective(-100, 0.1, 1e-3, "mean")
SETTINGS = {"label_smoothing": 0.1, "z_loss": 1e-3}


class Net(nn.Module):
    """Embedding, one layer and a head; forward gives the loss."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=bias)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embed(ids)))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, form: str) -> Any:
        h = self.hidden(ids)
        if form == "outside":
            return h
        if form == "plain":
            logits = self.head(h).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return linear_cross_entropy(h, self.head, targets, chunking=form, **SETTINGS)


def build(bias: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(bias)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank + 100 * step)
    ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=generator)
    targets = torch.randint(VOCAB, (2, TOKENS // 2), generator=generator)
    targets[0, 0] = -100
    return ids, targets


def sharded(bias: bool = False, dtype: torch.dtype | None = None) -> Any:
    net = build(bias)
    policy = lowtide.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (net.embed, net.layer, net.head, net):
        lowtide.fully_shard(unit, mp_policy=policy)
    return net


def small_blocks(net: nn.Module) -> int:
    """Blocks of a few rows from the next forward on; rows of a rank in each."""
    state = unit_state(net)
    assert state is not None and state.root is not None
    state.root.gradient_budget = 1
    return 128 // DIM


def full_grads(net: nn.Module) -> dict[str, torch.Tensor]:
    grads = {}
    for name, parameter in net.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        grads[name] = parameter.grad.full_tensor()
    return grads


def streamed_steps(dtype: torch.dtype | None, accumulate: bool) -> dict[str, Any]:
    net = sharded(dtype=dtype)
    stream_rows(net.head)
    net(*batch(0, 0), "vocabulary").backward()
    net.zero_grad()
    block_rows = small_blocks(net)
    losses = []
    for step in range(2):
        net.set_requires_gradient_sync(not accumulate or step == 1)
        loss = net(*batch(dist.get_rank(), step), "vocabulary")
        loss.backward()
        losses.append(loss.detach())
    state = unit_state(net.head)
    assert state is not None
    return {
        "losses": losses,
        "grads": full_grads(net),
        "rows": state.materialized().stream_rows().block_rows == block_rows,
        "blocks": state.materialized().stream_rows().num_blocks,
        "state": state.materialized().state,
    }


def steps_of_one_process(
    world_size: int, dtype: torch.dtype | None, accumulate: bool
) -> dict[str, Any]:
    losses: list[list[torch.Tensor]] = []
    by_rank: list[list[torch.Tensor]] = []
    for rank in range(world_size):
        losses.append([])
        by_rank.append([])
        for step in range(2):
            net = build().to(dtype or torch.float32)
            ids, targets = batch(rank, step)
            rows = StridedRows(net.head.weight, world_size, 128 // DIM)
            h = net.hidden(ids)
            loss, _ = loss_of_rows(
                h.flatten(0, 1), net.head.weight, None, targets.flatten(), rows, MEAN
            )
            loss.backward()
            losses[-1].append(loss.detach())
            gradient = rows._gradients.view(-1, DIM)[:VOCAB]
            by_rank[-1].append(gradient)
    if accumulate:
        head = average([first + second for first, second in by_rank])
    else:
        first, second = (average([g[s] for g in by_rank]) for s in range(2))
        assert first is not None and second is not None
        head = first + second
    return {"losses": losses, "head": head}


@pytest.mark.parametrize("accumulate", [False, True], ids=["sync_each", "sync_last"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_streamed_rows_are_bitwise_the_average_of_one_process(
    pool_of, world_size, dtype, accumulate
):
    expected = pool_of(1).run(steps_of_one_process, world_size, dtype, accumulate)[0]
    for rank, seen in enumerate(
        pool_of(world_size).run(streamed_steps, dtype, accumulate)
    ):
        assert seen["rows"] and seen["blocks"] > 3
        assert seen["state"] == "sharded"
        for actual, wanted in zip(
            seen["losses"], expected["losses"][rank], strict=True
        ):
            assert same_bits(actual, wanted)
        gradient = seen["grads"]["head.weight"]
        assert same_bits(gradient, expected["head"]), difference(
            gradient, expected["head"]
        )


def counted(net: Any) -> dict[str, int]:
    state = unit_state(net)
    assert state is not None
    groups = (state.groups.gather, state.groups.reduce)
    return {
        kind: sum(group.counters[kind][0] for group in groups)
        for kind in ("all-gather", "reduce-scatter")
    }


def one_step(form: str, bias: bool) -> dict[str, Any]:
    net = sharded(bias)
    for step in range(2):
        net.zero_grad()
        before = counted(net)
        loss = net(*batch(dist.get_rank(), step), form)
        if form == "outside":
            _, targets = batch(dist.get_rank(), step)
            loss = linear_cross_entropy(loss, net.head, targets, **SETTINGS)
        loss.backward()
    calls = {kind: n - before[kind] for kind, n in counted(net).items()}
    return {"loss": loss.detach(), "grads": full_grads(net), "calls": calls}


@pytest.mark.parametrize("bias", [False, True], ids=["weight", "bias"])
@pytest.mark.parametrize("form", ["tokens", "vocabulary", "outside"])
def test_every_form_agrees_with_the_logits(pool_of, form, bias):
    def plain() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        losses, grads = [], []
        for rank in range(2):
            net = build(bias)
            ids, targets = batch(rank, 1)
            logits = net.head(net.hidden(ids)).float().flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)
            kept = targets.flatten() != -100
            loss = loss + 1e-3 * logits.logsumexp(-1)[kept].square().mean()
            loss.backward()
            losses.append(loss.detach())
            grads.append({n: p.grad for n, p in net.named_parameters()})
        return losses, {n: (grads[0][n] + grads[1][n]) / 2 for n in grads[0]}

    if form == "outside" and bias:
        return  # gathered whole outside of the root's forward: the test below
    losses, grads = plain()
    for rank, seen in enumerate(pool_of(2).run(one_step, form, bias)):
        torch.testing.assert_close(seen["loss"], losses[rank])
        for name, gradient in grads.items():
            torch.testing.assert_close(
                seen["grads"][name], gradient, rtol=1e-5, atol=1e-7, msg=name
            )


def test_the_token_form_gathers_and_reduces_the_head_once(pool_of):
    """Embedding, layer, head: the embedding is not gathered in backward, the head's
    gradients are computed in forward. The root has no parameters of its own."""
    for seen in pool_of(2).run(one_step, "tokens", False):
        assert seen["calls"] == {"all-gather": 1 + 2 + 1, "reduce-scatter": 3}


def first_step_peak(announce: bool) -> int:
    net = sharded()
    if announce:
        stream_rows(net.head)
    state = unit_state(net.head)
    assert state is not None
    before = counted(net)["all-gather"]
    with torch.no_grad():
        net(*batch(0, 0), "vocabulary")
    return counted(net)["all-gather"] - before


def test_an_announced_head_is_not_gathered_ahead_in_the_first_step(pool_of):
    # Embedding, layer, and one block of rows; a guess gathers the head before.
    assert pool_of(2).run(first_step_peak, True) == [3, 3]
    assert pool_of(2).run(first_step_peak, False) == [4, 4]


def messages() -> list[str]:
    net, accumulating = sharded(), sharded()
    found = []
    h, targets = torch.randn(2, DIM), torch.zeros(2, dtype=torch.int64)
    accumulating.set_requires_gradient_sync(False)
    accumulating(*batch(0, 0), "plain").backward()

    def under_autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            sharded()(*batch(0, 0), "vocabulary")

    for call in (
        lambda: linear_cross_entropy(h, net.head, targets),
        lambda: linear_cross_entropy(h, net.head, targets, vocab_chunk=7),
        lambda: stream_rows(nn.Linear(2, 3)),
        lambda: stream_rows(sharded(bias=True).head),
        lambda: stream_rows(accumulating.head),
        under_autocast,
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_messages(pool_of):
    early, chunk, plain, bias, late, autocast = pool_of(1).run(messages)[0]
    assert "expected a forward of the root module before its rows are read" in early
    assert "expected None for a head whose rows are streamed, got 7" in chunk
    assert "expected a linear layer without bias that is a unit of its own" in plain
    assert plain.endswith("Call fully_shard(head) first.")
    assert bias == plain
    assert "its rows to be streamed from the beginning of a step on" in late
    assert "got gradients of it that are not reduced yet" in late
    assert "Call lowtide.losses.stream_rows before the first backward." in late
    assert "expected no autocast, or autocast to the unit's torch.float32" in autocast
    assert autocast.endswith("Leave autocast for the loss.")


def gradients_of(grads: str, form: str, bias: bool, own_unit: bool) -> list[Any]:
    net: Any = build(bias)
    if own_unit:
        lowtide.fully_shard(net.head, grads=grads)
    lowtide.fully_shard(net, grads=grads)
    loss = net(*batch(dist.get_rank(), 0), form)
    loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in net.parameters())]


@pytest.mark.parametrize("own_unit", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["vocabulary", "tokens"])
def test_gradients_summed_in_place_give_the_same(pool_of, form, bias, own_unit):
    """``grads="fused"`` gives the head another class, and the loss never calls it."""
    expected = pool_of(2).run(gradients_of, "exact", form, bias, own_unit)
    actual = pool_of(2).run(gradients_of, "fused", form, bias, own_unit)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
