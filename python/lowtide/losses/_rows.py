"""The rows of a head's weight, chunk by chunk, and the way back of their gradients."""

from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor

from lowtide._base.rows import RowChunk


def contiguous_chunks(vocab_size: int, chunk_rows: int) -> tuple[RowChunk, ...]:
    """Slices of at most ``chunk_rows`` rows, in order."""
    starts = range(0, vocab_size, chunk_rows)
    return tuple(RowChunk(s, min(chunk_rows, vocab_size - s)) for s in starts)


class VocabularyRows(Protocol):
    """Who holds the head's weight [vocab_size, features], as the loss sees it.

    The order of calls is the same on all ranks, whatever their tokens: one
    :meth:`read` in forward; in backward one more, and if ``parameter`` requires a
    gradient, for every chunk in turn ``gradient_buffer`` after its rows were handed
    out and ``put_gradient`` before the next chunk's are asked for, then
    ``take_gradient`` once. All work is enqueued on the current stream.
    """

    @property
    def vocab_size(self) -> int:
        """Rows without padding."""

    @property
    def features(self) -> int: ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the rows :meth:`read` yields; logits are rounded to it."""

    @property
    def chunks(self) -> tuple[RowChunk, ...]:
        """Every vocabulary row is in exactly one, every chunk has at least one; the
        order is that of every pass."""

    def read(self, *, backward: bool) -> Generator[Tensor, None, None]:
        """One pass of a forward or a backward: the rows [chunk.num_rows, features] of
        each of ``chunks``.

        A chunk's rows are read on the current stream until the next chunk's are asked
        for; then their memory is the owner's again. The generator is closed when the
        pass ends, also early by an exception. What padding rows hold is never read.
        """

    def gradient_buffer(self, chunk: RowChunk) -> Tensor:
        """Uninitialised, contiguous [chunk.num_rows, features], fp32 (fp64 for fp64).

        The loss fills all of it, padding with zeros. Never two at a time.
        """

    def put_gradient(self, chunk: RowChunk, gradient: Tensor) -> None:
        """The buffer comes back complete: summed over this rank's tokens, scaled by
        the incoming gradient. Its memory is the owner's again."""

    def take_gradient(self) -> Tensor | None:
        """After the last chunk: what autograd gets as the parameter's gradient."""


class TensorRows:
    """A weight that is here as a whole: slices, and a gradient written in place."""

    def __init__(
        self, weight: Tensor, compute_dtype: torch.dtype, chunk_rows: int
    ) -> None:
        self.vocab_size, self.features = weight.shape
        self.compute_dtype = compute_dtype
        self.chunks = contiguous_chunks(self.vocab_size, chunk_rows)
        self._weight = weight
        self._gradient: Tensor | None = None
        self._wide: Tensor | None = None

    def read(self, *, backward: bool) -> Generator[Tensor, None, None]:
        if self._weight.dtype == self.compute_dtype:
            for chunk in self.chunks:
                yield self._slice(self._weight, chunk)
            return
        cast = self._chunk_buffer(self.compute_dtype)
        for chunk in self.chunks:
            yield cast[: chunk.num_rows].copy_(self._slice(self._weight, chunk))

    def gradient_buffer(self, chunk: RowChunk) -> Tensor:
        if self._gradient is None:
            self._gradient = self._weight.new_empty(self._weight.shape)
        if self._weight.dtype == accumulate_dtype(self._weight.dtype):
            return self._slice(self._gradient, chunk)
        if self._wide is None:
            self._wide = self._chunk_buffer(torch.float32)
        return self._wide[: chunk.num_rows]

    def put_gradient(self, chunk: RowChunk, gradient: Tensor) -> None:
        if self._wide is not None:
            assert self._gradient is not None
            self._slice(self._gradient, chunk).copy_(gradient)

    def take_gradient(self) -> Tensor | None:
        gradient, self._gradient, self._wide = self._gradient, None, None
        return gradient

    def _chunk_buffer(self, dtype: torch.dtype) -> Tensor:
        shape = (self.chunks[0].num_rows, self.features)
        return self._weight.new_empty(shape, dtype=dtype)

    def _slice(self, tensor: Tensor, chunk: RowChunk) -> Tensor:
        return tensor[chunk.start : chunk.start + chunk.num_rows]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and of sums over tiles."""
    return torch.float64 if dtype == torch.float64 else torch.float32
