"""The rows of a head's weight, chunk by chunk, and the way back of their gradients."""

import dataclasses
from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RowChunk:
    """Which rows of the vocabulary a chunk holds; numbers only.

    ``blocks`` blocks of ``width`` rows: row ``b * width + i`` of the chunk is row
    ``start + b * stride + i`` of the vocabulary. One block is a plain slice. With
    ``stride`` rows on every rank, block b is what rank b contributes. Rows past the
    end of the vocabulary are padding; because ``stride >= width`` they are the last
    ones of the chunk.
    """

    start: int
    width: int
    blocks: int = 1
    stride: int = 0

    def __post_init__(self) -> None:
        assert self.start >= 0 and self.width > 0 and self.blocks > 0, self
        assert self.blocks == 1 or self.stride >= self.width, self

    @property
    def num_rows(self) -> int:
        """Padding included."""
        return self.blocks * self.width

    def num_valid(self, vocab_size: int) -> int:
        """Rows ahead of the padding."""
        firsts = (self.start + b * self.stride for b in range(self.blocks))
        return sum(min(max(vocab_size - first, 0), self.width) for first in firsts)

    def vocabulary_rows(self, vocab_size: int, device: torch.device) -> Tensor:
        """int64 [num_valid]: the vocabulary row of each row ahead of the padding."""
        row = torch.arange(self.num_valid(vocab_size), device=device)
        block = row.div(self.width, rounding_mode="floor")
        return row + block * (self.stride - self.width) + self.start

    def place(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Where in the chunk each target is: (row, 0 if elsewhere; whether inside).

        ``targets``: int64, vocabulary rows; what is none (an ignore index) is inside
        no chunk.
        """
        offset = targets - self.start
        inside = offset.ge(0)
        row = offset
        if self.blocks > 1:
            block = offset.div(self.stride, rounding_mode="floor")
            offset = offset - block * self.stride
            inside &= block.lt(self.blocks)
            row = offset + block * self.width
        inside &= offset.lt(self.width)
        return row.mul_(inside), inside


def contiguous_chunks(vocab_size: int, chunk_rows: int) -> tuple[RowChunk, ...]:
    """Slices of at most ``chunk_rows`` rows, in order."""
    starts = range(0, vocab_size, chunk_rows)
    return tuple(RowChunk(s, min(chunk_rows, vocab_size - s)) for s in starts)


def strided_chunks(
    vocab_size: int, world_size: int, rows_per_rank: int
) -> tuple[RowChunk, ...]:
    """Chunk k holds rows [k * c, (k + 1) * c) of every rank's shard, rank after rank.

    c = ``rows_per_rank``. Under ``Shard(0)`` rank r owns the vocabulary rows from
    r * ceil(vocab_size / world_size) on; shards are padded to that many rows.
    """
    shard = -(-vocab_size // world_size)
    return tuple(
        RowChunk(s, min(rows_per_rank, shard - s), blocks=world_size, stride=shard)
        for s in range(0, shard, rows_per_rank)
    )


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
        """Of the rows :meth:`read` yields; logits are rounded to it."""

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
    """Of statistics and of sums over tiles."""
    return torch.float64 if dtype == torch.float64 else torch.float32
