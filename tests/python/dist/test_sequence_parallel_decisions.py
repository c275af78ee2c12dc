"""Which gathers are done again, and that all ranks decide alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import lowtide
from support.sequence_parallel import (
    FEATURES,
    ROWS,
    figures,
    fresh_figures,
    group,
    shard_of,
    weights_of,
)


def decided(**policy: Any) -> dict[str, int]:
    """Which of the sites were gathered again."""
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8,), rank)
    with fresh_figures():
        with lowtide.sequence_parallel.gather_policy(**policy):
            outputs = [
                *lowtide.sequence_parallel.sp_gather_linear(
                    shard, weights, group=group(), name="a"
                ),
                *lowtide.sequence_parallel.sp_gather_linear(
                    shard, weights, group=group(), name="b"
                ),
                *lowtide.sequence_parallel.sp_gather_linear(
                    shard, weights, group=group(), name="always", regather=True
                ),
                *lowtide.sequence_parallel.sp_gather_linear(
                    shard, weights, group=group(), name="never", regather=False
                ),
            ]
        sum(y.sum() for y in outputs).backward()
        names = ("a", "b", "always", "never")
        return {name: figures(name)["regathers"] for name in names}


GATHERED = 2 * ROWS * FEATURES * 4


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ({"regather": "all", "min_bytes": 0}, {"a", "b", "always"}),
        ({"regather": ["b"], "min_bytes": 0}, {"b", "always"}),
        ({"regather": ["b"], "min_bytes": GATHERED}, {"b", "always"}),
        ({"regather": ["b"], "min_bytes": GATHERED + 1}, {"always"}),
        ({}, {"always"}),  # 32 MiB
        ({"regather": ["never"], "min_bytes": 0}, {"always"}),
    ],
    ids=["all", "name", "large enough", "too small", "default", "call decides"],
)
def test_name_and_size_decide_unless_the_call_does(pool_of, policy, again):
    for seen in pool_of(2).run(decided, **policy):
        assert {name for name, count in seen.items() if count} == again


def no_policy() -> dict[str, Any]:
    shard, weights = shard_of(dist.get_rank()), weights_of((8,), 0)
    (y,) = lowtide.sequence_parallel.sp_gather_linear(
        shard, weights, group=group(), name="plain"
    )
    y.sum().backward()
    text = ""
    try:
        lowtide.sequence_parallel.sp_all_gather(shard, group(), "x", regather=True)
    except RuntimeError as error:
        text = str(error)
    unmatched = ""
    try:
        with lowtide.sequence_parallel.gather_policy(regather=["atn_in"]):
            lowtide.sequence_parallel.sp_all_gather(shard, group(), "attn_in")
    except ValueError as error:
        unmatched = str(error)
    return {
        "regathers": figures("plain")["regathers"],
        "text": text,
        "unmatched": unmatched,
    }


def test_without_a_policy_nothing_is_gathered_again(pool_of):
    for seen in pool_of(2).run(no_policy):
        assert seen["regathers"] == 0
        assert seen["text"] == (
            "lowtide: sp_all_gather 'x': expected `with "
            "lowtide.sequence_parallel.gather_policy(...):` around the forward for "
            "regather=True, got none: what consumers save could not be seen. Add it, "
            "or use sp_gather_linear."
        )
        assert seen["unmatched"] == (
            "lowtide: gather_policy.regather: expected 'atn_in' to name a gather in "
            "the forward, got none. Did you mean 'attn_in'?"
        )


# -- agreement ----------------------------------------------------------------------


def uneven(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    lowtide.sequence_parallel.sp_all_gather(
        shard_of(rank, rows=ROWS + rank), group, "uneven"
    )


def decides_alone(group: dist.ProcessGroup) -> None:
    shard, weights = shard_of(0), weights_of((8,), 0)
    lowtide.sequence_parallel.sp_gather_linear(
        shard, weights, group=group, name="alone", regather=dist.get_rank() == 0
    )


def orders_differ(group: dist.ProcessGroup) -> None:
    shard, weights = shard_of(0), weights_of((8,), 0)
    loss: Any = 0.0
    for regather in (True, False, dist.get_rank() == 0):
        (y,) = lowtide.sequence_parallel.sp_gather_linear(
            shard, weights, group=group, name="order", regather=regather
        )
        loss = loss + y.sum()
    loss.backward()


def disagreements() -> list[str]:
    """Each program's message, on a group that is in its first step."""
    texts = []
    for program in (uneven, decides_alone, orders_differ):
        try:
            program(dist.new_group())
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_ranks_that_differ_hear_about_it_in_the_first_step(pool_of):
    again = ", gathered again in backward"
    sides = [
        ("'uneven' Float [6, 8]", "'uneven' Float [7, 8]", "0 of 1"),
        (f"'alone' Float [6, 8]{again}", "'alone' Float [6, 8]", "0 of 1"),
        (f"'order' Float [6, 8]{again}", "'order' Float [6, 8]", "2 of 3"),
    ]
    for rank, texts in enumerate(pool_of(2).run(disagreements)):
        assert texts == [
            "lowtide: sequence-parallel gathers: expected the same shards, names and "
            f"decisions in the same order on every rank, got {zero} on rank 0 and "
            f"{one} on rank 1 (entry {entry}, rank {rank} of 2). Pad the sequence so "
            "that every rank has as many tokens, and run the same program on all ranks."
            for zero, one, entry in sides
        ]
