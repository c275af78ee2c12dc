"""What sequence-parallel operators are compared with: torch's own collectives, the
gathered value saved by whoever uses it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from lowtide import _C
from lowtide._base.memory import ledger
from lowtide._gather.axes import axis_of

ROWS, FEATURES = 6, 8
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EVERYTHING: dict[str, Any] = {"regather": "all", "min_bytes": 0}


def bytes_held_after(forward: Callable[[], Tensor]) -> int:
    """Live bytes between forward and backward, beyond those before.

    The least of several runs: in some of them a thread of gloo still holds the tensors
    of its last call, for as long as it likes."""

    def held() -> int:
        timeline = _C.AllocationTimeline(CPU, ledger(CPU), capacity=1 << 14)
        with timeline:
            loss = forward()
            dist.barrier(group())
            time.sleep(0.01)
            torch.empty(1)
            live = timeline.samples()["total"][-1]
        loss.backward()
        return live

    return min(held() for _ in range(12))


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def figures(name: str) -> dict[str, int]:
    return axis_of(group(), CPU).figures()[name]


@contextlib.contextmanager
def fresh_figures() -> Iterator[None]:
    axis_of(group(), CPU).reset_figures()
    yield
    assert settles(lambda: ledger(CPU).live()["activations"] == 0)


def settles(condition: Callable[[], bool]) -> bool:
    """gloo's worker holds the tensors of a collective a little longer than we do."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def grads(*tensors: Tensor) -> list[Tensor]:
    taken = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    assert all(grad is not None for grad in taken)
    return taken  # type: ignore[return-value]


def same(got: list[Tensor], expected: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]


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
