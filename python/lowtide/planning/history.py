"""What an allocator was asked, and what it had after each operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

OpName = Literal["allocate", "record", "free", "synchronize", "empty_cache"]


@dataclass(frozen=True)
class Operation:
    """``id``: which allocation, in the order they were made. ``record``: ``stream``
    uses it too. ``synchronize``: the host waited for ``stream``, or without one for
    the whole device. ``pool``: what was allocated lies in memory apart, as a graph's or
    of a ``torch.cuda.MemPool``; 0: it does not."""

    op: OpName
    id: int | None = None
    bytes: int | None = None
    stream: int | None = None
    pool: int = 0


@dataclass(frozen=True)
class Settings:
    """How an allocator was set. ``conf``: as PYTORCH_ALLOC_CONF; ``events``: when the
    host knows that work is done, ``immediate`` or ``at_sync``."""

    conf: str = ""
    expandable: bool = False
    events: str = "immediate"

    def with_expandable_segments(self) -> Settings:
        conf = ",".join(filter(None, [self.conf, "expandable_segments:True"]))
        return replace(self, conf=conf, expandable=True)


class Replayed(NamedTuple):
    """What an allocator with other settings makes of the requests."""

    fits: bool
    reserved: int  # bytes at its peak, as far as it came
    retries: int  # allocations for which it gave its cache back


@dataclass
class History:
    settings: Settings
    # Does the operations again with other settings, on a device of so many bytes, or of
    # any.
    replay: Callable[[Settings, int | None], Replayed]
    operations: list[Operation] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)  # of allocations, by id
    blocks: list[int] = field(default_factory=list)  # bytes, as the allocator rounds
    allocated: list[int] = field(default_factory=list)  # after each operation
    reserved: list[int] = field(default_factory=list)


# csrc/phantom/observer/allocation_journal.h
ALLOCATE, FREE, USED, SEGMENT, WAIT_STREAM, WAIT_DEVICE = range(6)
Entry = tuple[int, int, int, int, int, int]  # kind, address, bytes, stream, block, pool

_UNIT = 512  # of bytes, in which blocks are handed out


def of_journal(
    entries: list[Entry],
    settings: Settings,
    replay: Callable[[Settings, int | None], Replayed],
) -> History:
    history = History(settings, replay)
    builder = _Builder(history)
    for entry in entries:
        builder.add(*entry)
    return history


class _Builder:
    def __init__(self, history: History) -> None:
        self.operations = history.operations
        self.history = history
        self._ids: dict[int, int] = {}  # of live addresses
        self._freed = 0  # id of the last one that was freed
        self._allocated = 0
        self._reserved = 0

    def add(
        self, kind: int, address: int, bytes: int, stream: int, block: int, pool: int
    ) -> None:
        if kind == ALLOCATE:
            self._allocate(address, bytes, stream, block, pool)
        elif kind == FREE:
            self._freed = self._ids.pop(address)
            self._allocated -= self.history.blocks[self._freed]
            self._append(Operation("free", self._freed))
        elif kind == USED:
            self._use(stream)
        elif kind == SEGMENT:
            self._reserved += bytes
            if bytes < 0:
                self._release()
        elif kind == WAIT_STREAM:
            self._append(Operation("synchronize", stream=stream))
        elif kind == WAIT_DEVICE:
            self._append(Operation("synchronize"))

    def _allocate(
        self, address: int, bytes: int, stream: int, block: int, pool: int
    ) -> None:
        self._ids[address] = len(self.history.blocks)
        if block < bytes:  # freed at once
            block = -(-bytes // _UNIT) * _UNIT
        self._allocated += block
        self.history.addresses.append(address)
        self.history.blocks.append(block)
        number = self._ids[address]
        self._append(Operation("allocate", number, bytes, stream, pool))

    def _use(self, stream: int) -> None:
        """Notes a use of the block that was freed last: torch tells of it behind the
        free."""
        place = len(self.operations) - 1
        while self.operations[place] != Operation("free", self._freed):
            place -= 1
        record = Operation("record", self._freed, stream=stream)
        self.operations.insert(place, record)
        for figures in (self.history.allocated, self.history.reserved):
            figures.insert(place, figures[place - 1] if place else 0)

    def _release(self) -> None:
        if self.operations and self.operations[-1].op == "empty_cache":
            self.history.reserved[-1] = self._reserved
        else:
            self._append(Operation("empty_cache"))

    def _append(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.history.allocated.append(self._allocated)
        self.history.reserved.append(self._reserved)
