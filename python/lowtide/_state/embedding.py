"""A large embedding's gradient, block by block of rows.

autograd's gradient of an embedding is as large as the table (1 GB for 128 K rows of
4096 in bf16), though a step touches few of its rows. A unit whose module is one large
``nn.Embedding`` computes it for one block of rows after the other, each as large as a
chunk of the gradient ring, from the gradient of the output: the same numbers in the
same order, never the table.
"""

import functools
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import _C
from lowtide._state.rows import RowChunk, strided_chunks

# Bytes of a table, in fp32, from which on its gradient comes in blocks. Below, the
# kernels that a block takes cost more than the bytes are worth.
LARGE_TABLE = 256 << 20


def wants_rows(module: nn.Module, original: type) -> bool:
    """Whether the unit of ``module``, an ``original``, takes its gradient in blocks."""
    return (
        original is nn.Embedding
        and isinstance(module, nn.Embedding)
        and module.weight.numel() * 4 >= LARGE_TABLE
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


class EmbeddingRows:
    """What the calls of one embedding in a step share. ``unit`` owns ``stream``."""

    def __init__(self, unit: _C.Unit) -> None:
        self._stream = unit.gradient_rows()
        # Recorded calls whose graphs are alive.
        self._calls: list[weakref.ref[Any]] = []
        # Those whose gradients came in this backward: its graph task, and
        # (indices, gradient of the output) in the order they came.
        self._task = -1
        self._arrived: dict[Any, tuple[Tensor, Tensor]] = {}

    def forward(self, module: nn.Embedding, indices: Tensor) -> Tensor:
        weight = module.weight
        # Inside a backward it is a recomputation: the first call delivers.
        recomputed = torch._C._current_graph_task_id() != -1
        if not (torch.is_grad_enabled() and weight.requires_grad) or recomputed:
            return F.embedding(indices, weight, module.padding_idx)
        output = _Lookup.apply(weight, indices, module.padding_idx, self)
        assert isinstance(output, Tensor)
        self._calls = [call for call in self._calls if call() is not None]
        self._calls.append(weakref.ref(output.grad_fn))
        return output

    def deliver(
        self, node: Any, indices: Tensor, gradient: Tensor, padding_idx: int | None
    ) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._arrived = task, {}
        self._arrived[node] = indices.flatten(), gradient.flatten(0, -2)
        calls = (call() for call in self._calls)
        waiting = (c for c in calls if c is not None and c not in self._arrived)
        if any(torch._C._will_engine_execute_node(call) for call in waiting):
            return
        arrived, self._arrived = self._arrived, {}
        self._stream.begin_backward()
        for block, chunk in enumerate(self._chunks()):
            rows = functools.reduce(
                Tensor.add_,
                (_gradient_of(chunk, padding_idx, *call) for call in arrived.values()),
            )
            self._stream.put(block, rows)

    def _chunks(self) -> tuple[RowChunk, ...]:
        stream = self._stream
        return strided_chunks(stream.num_rows, stream.world_size, stream.block_rows)


def _gradient_of(
    chunk: RowChunk, padding_idx: int | None, indices: Tensor, gradient: Tensor
) -> Tensor:
    """The rows of ``chunk``; what is not in it goes to a padding row behind them."""
    row, inside = chunk.place(indices)
    if padding_idx is not None:
        inside &= indices.ne(padding_idx)
    row = torch.where(inside, row, chunk.num_rows)
    rows = torch.ops.aten.embedding_dense_backward(
        gradient, row, chunk.num_rows + 1, chunk.num_rows, False
    )
    return rows[: chunk.num_rows]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        indices: Tensor,
        padding_idx: int | None,
        rows: EmbeddingRows,
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.padding_idx, ctx.rows = padding_idx, rows
        return F.embedding(indices, weight, padding_idx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        (indices,) = ctx.saved_tensors
        ctx.rows.deliver(ctx, indices, gradient, ctx.padding_idx)
        return None, None, None, None
