"""Which moment an allocation belongs to, and how sizes are read and written."""

from __future__ import annotations

import pytest

from lowtide.planning.moments import moments_of
from lowtide.planning.recording import Allocation
from lowtide.planning.report import gib, parse_bytes

LOSS = -7  # a stack number that stands for a loss function


def allocation(kind: str) -> Allocation:
    return Allocation(
        address=0,
        bytes=1,
        stream=0,
        operator="",
        stack=LOSS if kind == "loss" else 0,
        module="layer" if kind in ("module", "recompute") else None,
        in_backward=kind in ("backward", "recompute"),
        in_optimizer=kind == "optimizer",
        sequence=-1,
        owner="",
        near_parameter=False,
        time=0,
    )


def moments(kinds: str, *step_ends: int) -> list[str]:
    allocations = [allocation(kind) for kind in kinds.split()]
    return moments_of(allocations, step_ends, lambda a: a.stack == LOSS)


def test_a_step():
    kinds = "plain module plain loss plain backward recompute plain optimizer"
    assert moments(kinds, 9) == [
        *("setup", "forward", "loss", "loss", "loss", "backward", "backward"),
        *("optimizer", "optimizer"),
    ]


def test_operations_between_modules_belong_to_forward():
    assert moments("module plain module plain backward optimizer", 6)[:4] == [
        *("forward", "forward", "forward", "loss"),
    ]


def test_the_next_microbatch_is_forward_and_not_clipping():
    kinds = "module backward plain module backward plain optimizer"
    assert moments(kinds, 7) == [
        *("forward", "backward", "forward", "forward", "backward"),
        *("optimizer", "optimizer"),
    ]


def test_the_next_step_begins_with_its_batch():
    kinds = "module backward optimizer plain module backward optimizer"
    assert moments(kinds, 3, 7)[3:] == ["forward", "forward", "backward", "optimizer"]


def test_chunks_of_a_head_belong_to_the_loss():
    kinds = "module loss module loss backward recompute optimizer"
    assert moments(kinds, 7)[:6] == [
        *("forward", "loss", "loss", "loss", "backward", "backward"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 << 30),
        ("80 gb", 80 * 10**9),
        ("512M", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("1048576", 1 << 20),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0", "3 apples", "1e3GiB GiB", "80"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size such as 80GiB or 512MiB"):
        parse_bytes(text)


def test_sizes_are_written_with_three_digits():
    sizes = (18.81 * (1 << 30), 1.234 * (1 << 30), 512 << 20, 40 << 10, 0)
    assert [gib(size) for size in sizes] == [
        *("18.8 GiB", "1.23 GiB", "512 MiB", "40.0 KiB", "0.00 KiB"),
    ]
