"""Chunk sizes from bytes, where the caller names none."""

import torch

from lowtide.losses._rows import accumulate_dtype

# With one vocabulary chunk at a time: a tile of logits, and the wide gradient of a
# chunk's rows. Products of 4096 rows by 4096 features and more keep an H100 busy.
CHUNK_BYTES = 64 << 20
# With the whole vocabulary: each chunk of tokens reads the head twice and its gradient
# once, so short chunks wait for memory (docs/losses.md has the arithmetic).
WHOLE_VOCABULARY_TILE_BYTES = 256 << 20
_MULTIPLE = 128  # of whole matrix-unit tiles


def vocab_chunk_or_default(
    asked: int | None, vocab_size: int, features: int, dtype: torch.dtype
) -> int:
    row_bytes = max(1, features) * accumulate_dtype(dtype).itemsize
    return min(vocab_size, asked or _fitting(CHUNK_BYTES, row_bytes))


def token_chunk_or_default(
    asked: int | None,
    num_tokens: int,
    rows: int,
    dtype: torch.dtype,
    tile_bytes: int = CHUNK_BYTES,
) -> int:
    fitting = asked or _fitting(tile_bytes, rows * dtype.itemsize)
    return min(max(1, num_tokens), fitting)


def _fitting(total: int, each: int) -> int:
    return max(_MULTIPLE, total // each // _MULTIPLE * _MULTIPLE)
