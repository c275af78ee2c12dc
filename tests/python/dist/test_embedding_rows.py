"""A large embedding is read, and its gradient leaves, in blocks of rows: the bits are
those of the whole table and of the dense gradient, and neither ever exists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._sharding import embedding
from lowtide._sharding.unit import unit_state
from support.bits import difference, same_bits

ROWS, DIM = 301, 24  # 301 divides by none of 2, 3, 4


class Net(nn.Module):
    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, DIM, padding_idx=padding_idx)
        self.out = nn.Linear(DIM, 3)

    def forward(self, ids: torch.Tensor, calls: str) -> torch.Tensor:
        if calls == "checkpointed":
            x = checkpoint(self.embed, ids, use_reentrant=False)
        else:
            x = self.embed(ids)
        if calls == "twice":
            x = x * self.embed(ids.flip(0) // 2)
        return self.out(x).square().mean()


def ids(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + dist.get_rank() + 100 * step)
    # Some rows several times, most of them never.
    return torch.randint(ROWS // 4, (3, 20), generator=generator) * 4 % ROWS


@contextlib.contextmanager
def tables(*, large: bool) -> Iterator[None]:
    """Taken to be large, and read some twenty rows at a time; or not."""
    with (
        mock.patch.object(embedding, "LARGE_TABLE", 0 if large else 1 << 60),
        mock.patch.object(embedding, "LOOKUP_BYTES", 20 * 4 * DIM),
    ):
        yield


def trained(
    large: bool, calls: str, dtype: Any, padding_idx: int | None
) -> dict[str, Any]:
    """``dtype``: "any" is bf16 with gradients of any dtype."""
    with tables(large=large):
        torch.manual_seed(0)
        net: Any = Net(padding_idx)
        policy = lowtide.MixedPrecisionPolicy(dtype, torch.float32)
        if dtype == "any":
            policy = lowtide.MixedPrecisionPolicy(torch.bfloat16)
            for parameter in net.parameters():
                parameter.grad_dtype = None
        for unit in (net.embed, net.out, net):
            lowtide.fully_shard(unit, mp_policy=policy)
        net(ids(9), calls).backward()
        net.zero_grad()
        state = unit_state(net.embed)
        assert state is not None and state.root is not None
        state.root.gradient_budget = 1  # blocks of a few rows
        grads = []
        for sync in ((True,), (False, True), (True, True)):
            for step, reduce in enumerate(sync):
                net.set_requires_gradient_sync(reduce)
                net(ids(step), calls).backward()
            grads.append(net.embed.weight.grad.full_tensor())
            net.zero_grad()
        with torch.no_grad():
            loss = net(ids(3), calls)
        return {
            "grads": grads,
            "loss": loss,
            "in rows": state.embedding_rows is not None,
            "blocks": state.materialized().plan()["gradient_chunks"],
            "gathered": state.materialized().plan()["gathered"],
        }


@pytest.mark.parametrize("padding_idx", [None, 8])
@pytest.mark.parametrize(
    "dtype", [None, torch.bfloat16, "any"], ids=["fp32", "bf16", "any"]
)
@pytest.mark.parametrize("calls", ["once", "twice", "checkpointed"])
def test_bits_are_those_of_the_dense_gradient(
    pool_of, world_size, calls, dtype, padding_idx
):
    pool = pool_of(world_size)
    dense = pool.run(trained, False, calls, dtype, padding_idx)
    for seen, expected in zip(
        pool.run(trained, True, calls, dtype, padding_idx), dense, strict=True
    ):
        assert seen["in rows"] and not expected["in rows"]
        assert seen["blocks"] > 10
        assert seen["gathered"] < expected["gathered"] / 2  # two blocks of several
        assert same_bits(seen["loss"], expected["loss"])
        for actual, wanted in zip(seen["grads"], expected["grads"], strict=True):
            assert same_bits(actual, wanted), difference(actual, wanted)


def trained_twice_on_one_graph(large: bool) -> dict[str, Any]:
    with mock.patch.object(embedding, "LARGE_TABLE", 0 if large else 1 << 60):
        torch.manual_seed(0)
        net: Any = Net(None)
        for unit in (net.embed, net.out, net):
            lowtide.fully_shard(unit)
        loss = net(ids(0), "twice")
        loss.backward(retain_graph=True)
        once = net.embed.weight.grad.full_tensor()
        loss.backward()
        return {"once": once, "both": net.embed.weight.grad.full_tensor()}


def test_a_retained_graph_of_two_calls_delivers_once_in_each_backward(pool_of):
    pool = pool_of(2)
    for seen, expected in zip(
        pool.run(trained_twice_on_one_graph, True),
        pool.run(trained_twice_on_one_graph, False),
        strict=True,
    ):
        assert same_bits(seen["once"], expected["once"])
        assert same_bits(seen["both"], expected["both"])
        assert same_bits(seen["both"], 2 * seen["once"])


def largest_allocations(large: bool) -> list[int]:
    """Bytes of a step's allocations of the table's size and more."""
    with tables(large=large):
        net: Any = Net(None)
        for unit in (net.embed, net.out, net):
            lowtide.fully_shard(unit)
        net(ids(0), "once").backward()
        net.zero_grad()
        state = unit_state(net.embed)
        assert state is not None and state.root is not None
        state.root.gradient_budget = 1
        net(ids(1), "once").backward()  # plans again
        net.zero_grad()
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = net(ids(1), "once")
            loss.backward()
        events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
        return [size for size in sizes if size >= ROWS * DIM * 4]


def test_no_allocation_is_as_large_as_the_table(pool_of):
    (rows,) = pool_of(1).run(largest_allocations, True)
    (dense,) = pool_of(1).run(largest_allocations, False)
    # The sharded gradient, which is whole on one rank, but neither the gathered table
    # nor its gradient.
    assert len(rows) == 1
    assert len(dense) >= 3


def gathered_on_request() -> dict[str, Any]:
    with tables(large=True):
        net: Any = Net(None)
        lowtide.fully_shard(net.embed, reshard_after_forward=False)
        lowtide.fully_shard(net)
        net(ids(0), "once").backward()
        net(ids(1), "once")
        kept = unit_state(net.embed).materialized().state  # type: ignore[union-attr]
        net.embed.set_reshard_after_forward(True)
        net.embed.reshard()
        net(ids(1), "once")
        freed = unit_state(net.embed).materialized().state  # type: ignore[union-attr]
        net.embed.unshard()
        whole = net.embed(ids(2))
        net.embed.reshard()
        return {
            "kept": kept,
            "freed": freed,
            "equal": same_bits(whole, net.embed(ids(2))),
        }


def test_a_table_that_stays_gathered_is_read_whole(pool_of):
    for seen in pool_of(2).run(gathered_on_request):
        assert seen == {"kept": "unsharded", "freed": "sharded", "equal": True}


def outside_of_the_table(large: bool) -> list[str]:
    said = []
    with tables(large=large):
        net: Any = Net(None)
        for unit in (net.embed, net.out, net):
            lowtide.fully_shard(unit)
        for index in (-1, ROWS):
            try:
                net(torch.full((2, 3), index), "once")
            except IndexError as error:
                said.append(str(error))
    return said


def test_an_index_outside_of_the_table_raises_as_ever(pool_of):
    for seen, expected in zip(
        pool_of(2).run(outside_of_the_table, True),
        pool_of(2).run(outside_of_the_table, False),
        strict=True,
    ):
        assert len(seen) == 2 and seen == expected
