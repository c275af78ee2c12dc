"""What the bitwise contract takes from gloo: [Note: The left fold]."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.bits import same_bits
from support.left_fold import LeftFoldReduceScatter, left_fold

COLUMNS = (128, 384, 128 * 77, 128 * 1001)


def reduce_both_ways(dtype: torch.dtype) -> list[tuple[int, bool, bool, bool]]:
    """(columns, gloo sums in fold order, gloo averages by dividing that sum,
    LeftFoldReduceScatter agrees)"""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    rows = []
    for columns in COLUMNS:
        generator = torch.Generator().manual_seed(columns)
        shape = (world_size, world_size, columns)
        spread = torch.randn(shape, generator=generator).mul(3).exp()
        inputs = (torch.randn(shape, generator=generator) * spread).to(dtype)
        total, mean, fold = (torch.empty(columns, dtype=dtype) for _ in range(3))
        mine = inputs[rank].flatten()
        dist.reduce_scatter_tensor(total, mine.clone())
        dist.reduce_scatter_tensor(mean, mine.clone(), op=dist.ReduceOp.AVG)
        LeftFoldReduceScatter()(fold, mine, group, dist.ReduceOp.AVG)
        expected = left_fold(inputs[:, rank].unbind(), rank)
        rows.append(
            (
                columns,
                same_bits(total, expected),
                same_bits(mean, expected / world_size),
                same_bits(fold, mean),
            )
        )
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_padded_to_128_are_added_in_fold_order(pool_of, world_size, dtype):
    for rows in pool_of(world_size).run(reduce_both_ways, dtype):
        assert rows == [(columns, True, True, True) for columns in COLUMNS]
