"""What torch's allocator told the dry driver's observer becomes a history."""

from __future__ import annotations

from typing import Any

from lowtide.planning.history import (
    ALLOCATE,
    FREE,
    SEGMENT,
    USED,
    WAIT_DEVICE,
    WAIT_STREAM,
    History,
    Operation,
    Replayed,
    Settings,
    of_journal,
)

MIB = 1 << 20
A, B = 1 << 44, (1 << 44) + 2 * MIB


def history(*entries: tuple[int, ...]) -> History:
    whole: list[Any] = [(*entry, 0, 0)[:6] for entry in entries]
    return of_journal(whole, Settings(), lambda *_: Replayed(True, 0, 0))


def test_settings_with_segments_that_grow():
    settings = Settings("max_split_size_mb:64", events="at_sync")
    assert settings.with_expandable_segments() == Settings(
        "max_split_size_mb:64,expandable_segments:True", True, "at_sync"
    )


def test_blocks_are_what_the_allocator_handed_out():
    """A request of 1000 bytes that got a whole segment, because the rest was small."""
    found = history(
        (SEGMENT, A, 2 * MIB, 0),
        (ALLOCATE, A, 1000, 0, 2 * MIB),
        (ALLOCATE, B, 100, 0, 512),
        (FREE, A, 1000, 0),
        (ALLOCATE, A, 600, 0, 1024),
    )
    assert found.blocks == [2 * MIB, 512, 1024]
    assert found.allocated == [2 * MIB, 2 * MIB + 512, 512, 512 + 1024]
    assert found.reserved == [2 * MIB] * 4
    assert found.addresses == [A, B, A]


def test_a_block_that_was_freed_at_once_is_rounded():
    found = history((ALLOCATE, A, 513, 0), (ALLOCATE, B, 1, 0))
    assert found.blocks == [1024, 512]


def test_other_streams_that_used_a_block_come_before_its_free():
    found = history(
        (ALLOCATE, A, 512, 0),
        (FREE, A, 512, 0),
        (USED, A, 0, 7),
        (USED, A, 0, 9),
        (WAIT_STREAM, 0, 0, 7),
        (WAIT_DEVICE, 0, 0, 0),
    )
    assert found.operations == [
        Operation("allocate", 0, bytes=512, stream=0),
        Operation("record", 0, stream=7),
        Operation("record", 0, stream=9),
        Operation("free", 0),
        Operation("synchronize", stream=7),
        Operation("synchronize"),
    ]
    assert found.allocated == [512, 512, 512, 0, 0, 0]


def test_a_pool_is_told_with_what_was_allocated_there():
    found = history((ALLOCATE, A, 512, 7, 512, 3), (ALLOCATE, B, 512, 7, 512))
    assert [(o.stream, o.pool) for o in found.operations] == [(7, 3), (7, 0)]


def test_segments_that_go_are_one_emptied_cache():
    found = history(
        (SEGMENT, A, 2 * MIB, 0),
        (ALLOCATE, A, 512, 0),
        (SEGMENT, B, 20 * MIB, 0),
        (ALLOCATE, B, 20 * MIB, 0),
        (FREE, A, 512, 0),
        (FREE, B, 20 * MIB, 0),
        (SEGMENT, A, -2 * MIB, 0),
        (SEGMENT, B, -20 * MIB, 0),
    )
    assert [o.op for o in found.operations[-2:]] == ["free", "empty_cache"]
    assert found.reserved == [2 * MIB, 22 * MIB, 22 * MIB, 22 * MIB, 0]
