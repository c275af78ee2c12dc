"""Gathers done again in backward: the bits of torch's own, one collective a site, the
shard held instead of the gathered value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lowtide
from support.sequence_parallel import (
    DTYPES,
    EVERYTHING,
    FEATURES,
    bytes_held_after,
    consumers,
    figures,
    fresh_figures,
    grads,
    group,
    naive_all_gather,
    same,
    shard_of,
    weights_of,
)

SIZES = (8, 4, 4)


def linears_against_naive(dtype: str, regather: bool, addmm: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank, DTYPES[dtype]), weights_of(SIZES, rank)
    weights = [w.detach().to(DTYPES[dtype]).requires_grad_() for w in weights]
    bias = torch.arange(4.0).to(DTYPES[dtype]).requires_grad_()
    biases = [None, bias, None]
    with fresh_figures():
        outputs = lowtide.sequence_parallel.sp_gather_linear(
            shard * 1,
            weights,
            biases,
            group=group(),
            name="qkv",
            regather=regather,
            addmm=addmm,
        )
        sum((y.float() ** 2).sum() for y in outputs).backward()
    ours = grads(shard, *weights, bias)
    whole = naive_all_gather(shard * 1, group())
    expected = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    sum((y.float() ** 2).sum() for y in expected).backward()
    theirs = grads(shard, *weights, bias)
    return {
        "outputs": same(list(outputs), expected),
        "gradients": same(ours, theirs),
        "close": torch.allclose(ours[0].float(), theirs[0].float(), rtol=0.02),
        "figures": figures("qkv"),
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("regather", [True, False])
def test_linears_have_the_bits_of_separate_layers(pool_of, world, dtype, regather):
    for seen in pool_of(world).run(linears_against_naive, dtype, regather, False):
        assert all(seen["outputs"]) and all(seen["gradients"])
        assert seen["figures"] == {
            "gathers": 1,
            "regathers": int(regather),
            "prefetched": 0,
            "unused": 0,
            "shadowed": 0,
        }


def test_addmm_changes_only_the_shards_gradient(pool_of):
    for seen in pool_of(2).run(linears_against_naive, "bf16", True, True):
        assert all(seen["gradients"][1:]) and seen["close"]


def generic_against_naive(dtype: str) -> dict[str, Any]:
    rank = dist.get_rank()
    shard = shard_of(rank, DTYPES[dtype])
    weights = weights_of((8,), rank, DTYPES[dtype])
    with fresh_figures():
        with lowtide.sequence_parallel.gather_policy(**EVERYTHING):
            x = lowtide.sequence_parallel.sp_all_gather(shard * 1, group(), "x")
            loss = consumers(x, weights)
            del x
        loss.backward()
    ours = grads(shard, *weights)
    expected = consumers(naive_all_gather(shard * 1, group()), weights)
    expected.backward()
    return {
        "loss": torch.equal(loss, expected),
        "gradients": same(ours, grads(shard, *weights)),
        "regathers": figures("x")["regathers"],
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_consumer_shares_one_gather(pool_of, world, dtype):
    for seen in pool_of(world).run(generic_against_naive, dtype):
        assert seen["loss"] and all(seen["gradients"])
        assert seen["regathers"] == 1


def autocast_against_naive() -> list[bool]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of(SIZES, rank)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = lowtide.sequence_parallel.sp_gather_linear(
            shard * 1, weights, group=group(), name="auto", regather=True
        )
        sum((y.float() ** 2).sum() for y in outputs).backward()
    ours = grads(shard, *weights)
    with torch.autocast("cpu", torch.bfloat16):
        whole = naive_all_gather(shard * 1, group())
        expected = [F.linear(whole, w) for w in weights]
        sum((y.float() ** 2).sum() for y in expected).backward()
    dtypes = [y.dtype is torch.bfloat16 for y in outputs]
    return dtypes + same(ours, grads(shard, *weights))


def test_autocast(pool_of):
    for seen in pool_of(2).run(autocast_against_naive):
        assert all(seen)


# -- what is held -------------------------------------------------------------------


def saved_bytes(regather: bool) -> int:
    shard = shard_of(dist.get_rank(), rows=512)
    weights = weights_of((1,), 0)

    def forward() -> torch.Tensor:
        (y,) = lowtide.sequence_parallel.sp_gather_linear(
            shard * 1, weights, group=group(), name="big", regather=regather
        )
        return y.sum()

    return bytes_held_after(forward)


@pytest.mark.parametrize("world", [2, 4])
def test_a_site_holds_its_shard_instead_of_the_gathered_value(pool_of, world):
    shard = 512 * FEATURES * 4
    kept = pool_of(world).run(saved_bytes, False)
    again = pool_of(world).run(saved_bytes, True)
    for before, after in zip(kept, again, strict=True):
        # To a KiB: gloo's worker may still hold a digest of the first step.
        assert abs(before - after - (world - 1) * shard) < 1024
