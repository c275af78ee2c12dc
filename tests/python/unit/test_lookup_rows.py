"""How much of a large embedding forward reads at once."""

from __future__ import annotations

import pytest

from lowtide._sharding.embedding import LOOKUP_BYTES, MOST_LOOKUP_BYTES, lookup_rows

TOKENS = 128_256  # of Llama 3's vocabulary, as many for each of 8, 64 and 256 ranks


@pytest.mark.parametrize(
    ("among", "width", "blocks"),
    [
        (8, 4096, 8),  # of 8B: a table of 1002 MiB in bf16
        (32, 4096, 8),
        (64, 4096, 2),
        (256, 4096, 2),
        (64, 8192, 2),  # of 70B
        (64, 16384, 4),  # halves would be longer than the most
        (64, 256, 1),  # less than LOOKUP_BYTES
    ],
)
def test_blocks_of_a_table(among, width, blocks):
    shard = TOKENS // among
    rows = lookup_rows(shard, among, 2 * width)
    assert -(-shard // rows) == blocks
    assert rows * among * 2 * width <= max(LOOKUP_BYTES, MOST_LOOKUP_BYTES)
    assert blocks * rows - shard < blocks  # of equal size


def test_a_row_of_each_rank_at_least():
    assert lookup_rows(3, 4096, 1 << 20) == 1
