"""Every kind of backward over gathers that are done again, and what user code may do
to their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from support.sequence_parallel import (
    EVERYTHING,
    figures,
    fresh_figures,
    grads,
    group,
    same,
    shard_of,
    weights_of,
)


def two_sites(shard: Tensor, weights: list[Tensor]) -> Tensor:
    with lowtide.sequence_parallel.gather_policy(**EVERYTHING):
        x = lowtide.sequence_parallel.sp_all_gather(shard * 1, group(), "first")
        hidden = lowtide.sequence_parallel.sp_reduce_scatter(
            F.linear(x, weights[0]).sin(), group()
        )
        (y,) = lowtide.sequence_parallel.sp_gather_linear(
            hidden, weights[1:], group=group(), name="second"
        )
    return (y**2).sum()


def kinds_of_backward() -> dict[str, Any]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8, 4), rank)
    seen: dict[str, Any] = {}
    with fresh_figures():
        loss = two_sites(shard, weights)
        loss.backward(retain_graph=True)
        first = grads(shard, *weights)
        loss.backward()
        seen["retained"] = same(grads(shard, *weights), first)
        seen["twice"] = [figures(n)["regathers"] for n in ("first", "second")]
    with fresh_figures():
        loss = two_sites(shard, weights)
        (partial,) = torch.autograd.grad(loss, [weights[1]])
        seen["partial"] = torch.equal(partial, first[2])
        seen["partly"] = [figures("second")["regathers"]]
        seen["partly"].append(figures("first")["regathers"])
    with fresh_figures():
        for _ in range(2):
            two_sites(shard, weights).backward()
        doubled = grads(shard, *weights)
        seen["accumulated"] = same(doubled, [g * 2 for g in first])
        seen["prefetched"] = figures("first")["prefetched"]
    with fresh_figures():
        losses = [two_sites(shard, weights) for _ in range(2)]
        sum(losses).backward()
        seen["together"] = same(grads(shard, *weights), doubled)
        seen["both"] = [figures(n)["regathers"] for n in ("first", "second")]
    with fresh_figures(), torch.no_grad():
        two_sites(shard, weights)
        seen["inference"] = figures("first")["regathers"]
    return seen


def test_every_kind_of_backward(pool_of):
    for seen in pool_of(2).run(kinds_of_backward):
        assert all(seen["retained"]) and seen["twice"] == [2, 2]
        assert seen["partial"] and seen["partly"] == [1, 0]
        assert all(seen["accumulated"]) and seen["prefetched"] == 2
        assert all(seen["together"]) and seen["both"] == [2, 2]
        assert seen["inference"] == 0


class Bomb(torch.autograd.Function):
    armed = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Bomb.armed:
            raise ArithmeticError("on purpose")
        return gradient


def survives_an_exception() -> list[bool]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8, 4), rank)
    two_sites(shard, weights).backward()
    expected = grads(shard, *weights)
    Bomb.armed = True
    with fresh_figures():
        with pytest.raises(ArithmeticError):
            two_sites(Bomb.apply(shard), weights).backward()
    with (
        fresh_figures(),
        pytest.raises(ArithmeticError),
        lowtide.sequence_parallel.gather_policy(),
    ):
        raise ArithmeticError
    for tensor in (shard, *weights):
        tensor.grad = None
    two_sites(shard, weights).backward()
    return same(grads(shard, *weights), expected)


def test_training_goes_on_after_an_exception(pool_of):
    for seen in pool_of(2).run(survives_an_exception):
        assert all(seen)


# -- checkpoints --------------------------------------------------------------------


def in_a_checkpoint(kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8, 4), rank)
    two_sites(shard, weights).backward()
    expected = grads(shard, *weights)

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return two_sites(x, weights)

    with fresh_figures():
        if kind == "lowtide":
            loss = lowtide.checkpoint(Block())(shard * 1)
        else:
            loss = checkpoint(Block(), shard * 1, use_reentrant=kind == "reentrant")
        before = {n: figures(n)["gathers"] for n in ("first", "second")}
        loss.backward()
        return {
            "gradients": same(grads(shard, *weights), expected),
            "in backward": [
                figures(n)["gathers"] - before[n] + figures(n)["regathers"]
                for n in ("first", "second")
            ],
            "shadowed": figures("first")["shadowed"],
        }


@pytest.mark.parametrize("kind", ["torch", "lowtide", "reentrant"])
def test_a_checkpoint_gathers_once_in_backward(pool_of, kind):
    for seen in pool_of(2).run(in_a_checkpoint, kind):
        assert all(seen["gradients"])
        assert seen["in backward"] == [1, 1]
        assert kind == "reentrant" or seen["shadowed"] > 0


# -- what user code may do ----------------------------------------------------------


def escapes() -> dict[str, Any]:
    shard, weights = shard_of(dist.get_rank()), weights_of((8,), 0)
    with fresh_figures():
        with lowtide.sequence_parallel.gather_policy(**EVERYTHING):
            x = lowtide.sequence_parallel.sp_all_gather(shard * 1, group(), "x")
            y = F.linear(x, weights[0])
        text = ""
        try:
            assert y.grad_fn._saved_self is not None
        except RuntimeError as error:
            text = str(error)
        gathers = figures("x")["regathers"]
        kept = x.detach().clone()
        (y**2).sum().backward()
        return {
            "text": text,
            "gathers": gathers,
            "regathers": figures("x")["regathers"],
            "kept": torch.equal(x, kept),
        }


def test_a_saved_tensor_read_outside_backward_issues_no_collective(pool_of):
    for rank, seen in enumerate(pool_of(2).run(escapes)):
        assert seen["text"] == (
            "lowtide: sequence-parallel gather 'x': expected its saved value to be "
            "read inside backward, which gathers it again, got a read outside of it "
            f"(rank {rank} of 2). Read a tensor of your own, or keep this one with "
            "regather=False."
        )
        assert seen["gathers"] == 0
        # Whether a rank still holds the value must not decide about a collective.
        assert seen["regathers"] == 1 and seen["kept"]


def writes_in_place() -> list[str]:
    texts = []
    for what in ("shard", "gathered", "before", "linear"):
        shard = shard_of(dist.get_rank()) * 1
        weights = weights_of((8,), 0)
        try:
            with lowtide.sequence_parallel.gather_policy(**EVERYTHING):
                if what == "linear":
                    (y,) = lowtide.sequence_parallel.sp_gather_linear(
                        shard, weights, group=group(), name="x"
                    )
                else:
                    x = lowtide.sequence_parallel.sp_all_gather(shard, group(), "x")
                    if what == "before":
                        x = x.mul_(2)
                    y = F.linear(x, weights[0])
            with torch.no_grad():
                (x if what == "gathered" else shard).mul_(2)
            y.sum().backward()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_a_write_in_place_names_the_site_and_the_tensor(pool_of):
    for rank, texts in enumerate(pool_of(2).run(writes_in_place)):
        shard, gathered, before, linear = texts
        assert (
            shard
            == linear
            == (
                "lowtide: sequence-parallel gather 'x': expected the shard at version "
                "0, as it was gathered, got version 1: something wrote to it in place "
                f"(rank {rank} of 2). Write out of place: backward gathers the shard "
                "again."
            )
        )
        assert (
            gathered
            == before
            == (
                "lowtide: sequence-parallel gather 'x': expected the gathered tensor "
                "at version 0, as it was gathered, got version 1: something wrote to "
                f"it in place (rank {rank} of 2). Write out of place: backward needs "
                "the value."
            )
        )


def writes_to_another_saved_tensor() -> str:
    """One that is not gathered: hooks switch off autograd's own check of versions."""
    shard = shard_of(dist.get_rank())
    with lowtide.sequence_parallel.gather_policy(**EVERYTHING):
        hidden = shard * 1
        loss = (hidden**2).sum()
    with torch.no_grad():
        hidden.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_write_to_any_saved_tensor_under_a_policy_raises(pool_of):
    for text in pool_of(2).run(writes_to_another_saved_tensor):
        assert text == (
            "lowtide: gather_policy: expected a tensor that backward needs at version "
            "0, as it was saved, got version 1: something wrote to it in place. Write "
            "out of place."
        )


def with_create_graph() -> list[str]:
    texts = []
    weights = weights_of((8,), 0)
    calls = {
        "generic": lambda x: lowtide.sequence_parallel.sp_all_gather(x, group(), "x"),
        "linear": lambda x: lowtide.sequence_parallel.sp_gather_linear(
            x, weights, group=group(), name="x"
        )[0],
        "scatter": lambda x: lowtide.sequence_parallel.sp_reduce_scatter(x, group()),
    }
    for call in calls.values():
        with lowtide.sequence_parallel.gather_policy(**EVERYTHING):
            loss = (call(shard_of(dist.get_rank()) * 1) ** 2).sum()
        try:
            torch.autograd.backward(loss, create_graph=True)
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_create_graph_is_refused_by_name(pool_of):
    after = (
        ": expected a backward without create_graph, got create_graph=True. Compute "
        "higher-order derivatives on a model without sequence parallelism."
    )
    gather = f"lowtide: sequence-parallel gather 'x'{after}"
    for texts in pool_of(2).run(with_create_graph):
        assert texts[:2] == [gather, gather]
        assert texts[2].startswith("lowtide: sequence-parallel")
        assert texts[2].endswith(after)
