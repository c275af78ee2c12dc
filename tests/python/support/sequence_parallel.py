"""What sequence-parallel operators are compared with: torch's own collectives, the
gathered value saved by whoever uses it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

ROWS, FEATURES = 6, 8


def naive_all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Elsewhere the value is a wrapper that waits when it is first used.
    return all_gather_tensor_autograd(shard, 0, group) * 1


def naive_reduce_scatter(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter_tensor_autograd(partial, "sum", 0, group) * 1


def shard_of(
    rank: int, dtype: torch.dtype = torch.float32, rows: int = ROWS, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(rows, FEATURES, generator=generator).to(dtype).requires_grad_()


def weights_of(
    sizes: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    return [
        torch.randn(size, FEATURES, generator=generator).to(dtype).requires_grad_()
        for size in sizes
    ]


def consumers(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Linear layers, views that are saved transposed, products with itself, a wider
    dtype: what autograd saves of ``x`` in one way or another."""
    y = F.linear(x, weights[0])
    heads = x.unflatten(1, (4, -1)).transpose(0, 1)
    scores = torch.bmm(heads, heads.transpose(1, 2))
    square = (x * x).sum() + F.gelu(x).sum() + (x.double() ** 2).sum().float()
    return (y.float() ** 2).sum() + scores.float().sum() + square.float()
