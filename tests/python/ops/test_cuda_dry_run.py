"""The operators on CUDA without a GPU: which kernels they launch, and what they
allocate. Over the dry driver, whose kernels compute nothing."""

from __future__ import annotations

import json

import pytest

from lowtide import _C
from support import list_operators_dry_run
from support.dry_cuda import run_dry

BLOCK = 512  # bytes, the allocator's least


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """{operator: [launches, bytes, peak bytes]}"""
    if not _C.build_info()["cuda"]:
        return {}
    printed = run_dry(
        [list_operators_dry_run.__file__], memory=1 << 30, events="immediate"
    )
    return json.loads(printed.splitlines()[-1])


def test_a_list_is_one_launch_and_allocates_nothing(found):
    for name in ("copy 48", "copy into a chunk", "add", "scale", "rows"):
        if found:
            assert found[name] == [1, 0, 0], name


def test_more_pairs_or_types_are_more_launches(found):
    if found:
        assert found["copy 48 and 2"] == [2, 0, 0]
        assert found["copy of two types"] == [2, 0, 0]


def test_the_norm_takes_two_launches_and_a_sum_for_each_group(found):
    if found:
        launches, kept, peak = found["norm"]
        assert (launches, kept) == (2, BLOCK)
        assert peak == 2 * BLOCK  # 48 groups of 8 bytes, and the norm


def test_clipping_takes_the_kernels_unless_told_otherwise(found):
    if found:
        launches, _, peak = found["clip"]
        # The norm's two, one to scale, and four on one number.
        assert launches == 7
        assert peak <= 6 * BLOCK
        assert found["clip as torch"][0] > 48
