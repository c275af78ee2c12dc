"""Which rows of a large parameter a chunk holds."""

import dataclasses

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
