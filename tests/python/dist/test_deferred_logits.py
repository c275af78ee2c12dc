"""``defer_logits`` in a sharded model: the same bits as ``linear_cross_entropy`` called
by hand, wherever the head and its loss are."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lowtide
from lowtide.losses import defer_logits, linear_cross_entropy
from support.bits import same_bits
from support.deferred_heads import trained

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
        self.widens = False
        self.masked = False

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        h = self.norm(torch.tanh(self.layer(self.embed(ids))))
        if self.widens:
            h = h.float()  # the head's unit has to cast it
        if self.last == "hidden":
            return h
        if self.last == "by hand":
            return self.by_hand(h, targets)
        logits = self.head(h)
        return logits if self.last == "logits" else self.loss_of(logits, targets)

    def loss_of(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        flat, classes = logits.float().flatten(0, 1), targets.flatten()
        if self.masked:
            each = F.cross_entropy(flat, classes, reduction="none")
            return (each * mask(each)).sum() / 4
        return F.cross_entropy(flat, classes)

    def by_hand(self, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.masked:
            each = linear_cross_entropy(h, self.head, targets, reduction="none")
            return (each.flatten() * mask(each.flatten())).sum() / 4
        return linear_cross_entropy(h, self.head, targets)


def mask(each: torch.Tensor) -> torch.Tensor:
    """Some tokens of a fine-tuning, some more than others."""
    return torch.arange(len(each)) % 3


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1 + dist.get_rank() + 100 * step)
    ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=g)
    targets = torch.randint(VOCAB, (2, TOKENS // 2), generator=g)
    targets[0, 0] = -100
    return ids, targets


def sharded(
    place: str,
    bias: bool,
    dtype: torch.dtype | None,
    early: bool,
    grads: Any,
    replicas: int = 1,
) -> Any:
    torch.manual_seed(0)
    net = Net(bias)
    if early:
        defer_logits(net.head)
    policy = lowtide.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard: Any = functools.partial(lowtide.fully_shard, mp_policy=policy, grads=grads)
    if replicas > 1:
        shape, names = (replicas, dist.get_world_size() // replicas), ("dp", "fsdp")
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        shard = functools.partial(shard, mesh=mesh)
    for unit in (net.embed, net.layer):
        shard(unit)
    if place.startswith("own unit"):
        shard(net.head)
        net.widens = True
    elif place == "group":
        shard([net.norm, net.head], reshard_after_forward=False)
    elif place == "resharded group":
        shard([net.norm, net.head], reshard_after_forward=True)
    shard(net, reshard_after_forward="resharded root" in place or None)
    return net


def steps(
    place: str,
    form: str,
    bias: bool = False,
    dtype: torch.dtype | None = None,
    early: bool = False,
    grads: Any = "exact",
    masked: bool = False,
    replicas: int = 1,
) -> dict[str, Any]:
    """``form``: who makes the loss of what, and whether it is in the root's forward."""
    who, where = form.split()
    net = sharded(place, bias, dtype, early, grads, replicas)
    net.masked = masked
    if who in ("deferred", "looked") and not early:
        defer_logits(net.head)

    def loss_of_step(step: int) -> torch.Tensor:
        ids, targets = batch(step)
        if who == "hand":
            net.last = "by hand" if where == "inside" else "hidden"
            loss = net(ids, targets)
            if where == "outside":
                loss = net.by_hand(loss, targets)
        else:
            net.last = "loss" if where == "inside" else "logits"
            loss = net(ids, targets)
            if where == "outside":
                loss = net.loss_of(loss if who != "looked" else loss * 1, targets)
        return loss

    return trained(net, loss_of_step, 4)


def require_same_bits(actual: list[Any], expected: list[Any]) -> None:
    for mine, wanted in zip(actual, expected, strict=True):
        for one, other in zip(mine["numbers"], wanted["numbers"], strict=True):
            assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["weight", "bias"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(
    "place", ["own unit", "own unit, resharded root", "group", "root"]
)
def test_bits_of_the_loss_called_by_hand(pool_of, place, where, bias, dtype):
    expected = pool_of(2).run(steps, place, f"hand {where}", bias, dtype)
    actual = pool_of(2).run(steps, place, f"deferred {where}", bias, dtype)
    assert all(not rank["says"] for rank in actual)
    require_same_bits(actual, expected)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("place", ["own unit", "group", "root"])
def test_replicas_of_shards(pool_of, place, where):
    expected = pool_of(4).run(steps, place, f"hand {where}", True, replicas=2)
    actual = pool_of(4).run(steps, place, f"deferred {where}", True, replicas=2)
    assert all(not rank["says"] for rank in actual)
    require_same_bits(actual, expected)
    # Whose sums are those of all four, in another order.
    alone = pool_of(4).run(steps, place, f"deferred {where}", True)
    for mine, wanted in zip(actual, alone, strict=True):
        for one, other in zip(mine["numbers"], wanted["numbers"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True], ids=["weight", "bias"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("place", ["own unit", "group", "root"])
def test_losses_of_each_token_make_no_logits(pool_of, place, where, bias):
    def run(who: str) -> Any:
        return pool_of(2).run(steps, place, f"{who} {where}", bias, masked=True)

    actual = run("deferred")
    assert all(not rank["says"] for rank in actual)
    require_same_bits(actual, run("hand"))
    if where == "outside":
        for mine, plain in zip(actual, run("looked"), strict=True):
            assert plain["says"]
            for one, other in zip(mine["numbers"], plain["numbers"], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["weight", "bias"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_group_that_lets_go_of_its_weights_gathers_them_for_the_loss(
    pool_of, where, bias
):
    expected = pool_of(2).run(steps, "group", f"hand {where}", bias)
    actual = pool_of(2).run(steps, "resharded group", f"deferred {where}", bias)
    assert all(not rank["says"] for rank in actual)
    require_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "place",
    ["own unit", "own unit, resharded root", "group", "resharded group", "root"],
)
def test_whoever_looks_gets_the_bits_of_the_head(pool_of, place, dtype):
    expected = pool_of(2).run(steps, place, "plain outside", True, dtype)
    actual = pool_of(2).run(steps, place, "looked outside", True, dtype)
    for rank in actual:
        assert rank["says"] and all("torch.Tensor.mul" in said for said in rank["says"])
    require_same_bits(actual, expected)


def outputs_in_fp32(who: str) -> dict[str, Any]:
    """Of the root, whose hook casts from C++."""
    torch.manual_seed(0)
    net: Any = Net(False)
    policy = lowtide.MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, output_dtype=torch.float32
    )
    lowtide.fully_shard(net, mp_policy=policy)
    if who in ("deferred", "looked"):
        defer_logits(net.head)
    ids, targets = batch(0)
    logits = net(ids, targets)
    if who == "hand":
        net.last = "by hand"
        loss = net(ids, targets)
    else:
        deferred = logits * 1 if who == "looked" else logits
        loss = F.cross_entropy(deferred.flatten(0, 1), targets.flatten())
    loss.backward()
    full = [parameter.grad.full_tensor() for parameter in net.parameters()]
    return {"numbers": [loss.detach(), *full], "dtype": logits.dtype}


def test_a_root_that_casts_its_outputs(pool_of):
    hand, deferred = (
        pool_of(2).run(outputs_in_fp32, who) for who in ("hand", "deferred")
    )
    assert all(rank["dtype"] == torch.float32 for rank in deferred)
    require_same_bits(deferred, hand)
    looked, plain = (
        pool_of(2).run(outputs_in_fp32, who) for who in ("looked", "plain")
    )
    require_same_bits(looked, plain)


def outputs_in_bf16(modules: str, who: str) -> dict[str, Any]:
    """Of the head's unit, as accelerate has it. ``"hand"``: of no unit."""
    torch.manual_seed(0)
    net: Any = Net(bias=modules == "bias")
    half = torch.bfloat16
    plain = lowtide.MixedPrecisionPolicy(half, torch.float32)
    casts = lowtide.MixedPrecisionPolicy(half, torch.float32, output_dtype=half)
    unit = [net.norm, net.head] if modules == "group" else net.head
    lowtide.fully_shard(unit, mp_policy=plain if who == "hand" else casts)
    lowtide.fully_shard(net, mp_policy=plain)
    if who != "hand":
        defer_logits(net.head)
    net.last = "by hand" if who == "hand" else "logits"
    ids, targets = batch(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "lowtide: deferred logits")
        output = net(ids, targets)
        loss = output if who == "hand" else net.loss_of(output, targets)
    (loss / 3).backward()  # a gradient that bf16 would round
    full = [parameter.grad.full_tensor() for parameter in net.parameters()]
    return {"numbers": [loss.detach(), *full]}


@pytest.mark.parametrize("modules", ["group", "bias", "weight"])
def test_a_unit_that_casts_its_outputs_leaves_the_loss(pool_of, modules):
    hand, deferred = (
        pool_of(2).run(outputs_in_bf16, modules, who) for who in ("hand", "deferred")
    )
    require_same_bits(deferred, hand)


@pytest.mark.parametrize("place", ["own unit", "root"])
def test_before_fully_shard_and_with_gradients_summed_in_place(pool_of, place):
    after = pool_of(2).run(steps, place, "deferred outside", grads="fused")
    before = pool_of(2).run(steps, place, "deferred outside", early=True, grads="fused")
    require_same_bits(before, after)
    exact = pool_of(2).run(steps, place, "hand outside")
    for mine, wanted in zip(before, exact, strict=True):
        torch.testing.assert_close(mine["numbers"], wanted["numbers"])


def test_a_root_that_lets_go_of_its_weights(pool_of):
    expected = pool_of(2).run(steps, "root", "hand inside")
    actual = pool_of(2).run(steps, "resharded root", "deferred inside")
    require_same_bits(actual, expected)
    for who in ("deferred", "looked"):
        for outcome in pool_of(2).outcomes(steps, "resharded root", f"{who} outside"):
            assert outcome.error_type == "RuntimeError"
            assert "expected the head's weight to stay gathered until" in outcome.error
            assert "Shard the head by itself (fully_shard(head))" in outcome.error


def looked_at_after_a_step(place: str, foreach: bool) -> list[torch.Tensor]:
    net = sharded(place, False, None, False, "exact")
    defer_logits(net.head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=foreach)
    for _ in range(2):
        logits = net(*batch(0))
        net.loss_of(logits, batch(0)[1]).backward()
        optimizer.step()
    return [logits + 0]


@pytest.mark.parametrize("foreach", [False, True], ids=["for", "foreach"])
@pytest.mark.parametrize("place", ["own unit", "group", "root"])
def test_logits_of_weights_that_were_stepped_are_refused(pool_of, place, foreach):
    for outcome in pool_of(2).outcomes(looked_at_after_a_step, place, foreach):
        assert outcome.error_type == "RuntimeError"
        got = "resharded" if place == "root" else "written to since"
        assert f"got it {got}" in outcome.error


def parallel_head() -> list[Any]:
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net: Any = Net(False)
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    ids, targets = (torch.stack(both) for both in zip(batch(0), batch(0), strict=True))
    ids, targets = ids[:1, 0], targets[:1, 0]
    dist.broadcast(ids, 0)
    dist.broadcast(targets, 0)
    expected = net(ids, targets).detach()
    parallelize_module(net.head, mesh, ColwiseParallel(output_layouts=Replicate()))
    defer_logits(net.head)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = net(ids, targets)
    return [expected, logits.detach(), [str(one.message) for one in caught]]


def test_a_parallel_head_is_called(pool_of):
    for expected, logits, says in pool_of(2).run(parallel_head):
        torch.testing.assert_close(logits, expected)
        assert len(says) == 1 and "a head with hooks, which want" in says[0]
