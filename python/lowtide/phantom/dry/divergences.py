"""Where the calls of ranks go apart, and how that is said."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from .call_logs import Call, Communicator, Log, shown

_SHOWN_BEFORE = 3


@dataclass(frozen=True)
class Entry:
    """A call in the log of its rank, by number from 1 on."""

    call: Call
    number: int


@dataclass(frozen=True)
class Side:
    """What a rank would ask next, if anything, and what it asked last before."""

    rank: int
    entry: Entry | None
    before: tuple[Call, ...]

    def __str__(self) -> str:
        if self.entry is None:
            return f"  rank {self.rank}: nothing more"
        return f"  rank {self.rank}, call {self.entry.number}: {self.entry.call}"

    def is_behind_the_same(self, other: Side) -> bool:
        calls = zip(self.before, other.before, strict=False)
        return len(self.before) == len(other.before) and all(
            one.signature == two.signature for one, two in calls
        )


class Difference(enum.Enum):
    """What is expected, what is not, and what comes of it on GPUs."""

    CALLS = (
        "the same calls of NCCL in the same order, got others",
        "they would wait for each other without end",
    )
    ORDER = (
        "the same calls of NCCL in the same order, got another one over their "
        "communicators",
        "they would wait for each other without end",
    )
    UNITS = (
        "the same calls of NCCL for the same units, got others",
        "each would take the other's bytes for its own, and no error would say so",
    )


@dataclass(frozen=True)
class Divergence:
    """Ranks that would wait for each other, or mix units up."""

    sides: tuple[Side, ...]
    difference: Difference = Difference.CALLS

    @property
    def first(self) -> int:
        """The number of the earliest call."""
        return min(side.entry.number for side in self.sides if side.entry)

    def __str__(self) -> str:
        ranks = shown(tuple(side.rank for side in self.sides))
        expected, consequence = self.difference.value
        parts = [f"lowtide: {ranks}: expected {expected}:", *map(str, self.sides)]
        if any(side.before for side in self.sides):
            parts += ["before that:", *self._before()]
        parts.append(
            f"On GPUs {consequence}. Let every rank decide alike about these calls and "
            "their order."
        )
        return "\n".join(parts)

    def _before(self) -> list[str]:
        first = self.sides[0]
        if all(side.is_behind_the_same(first) for side in self.sides):
            return [f"  each: {call}" for call in first.before]
        return [
            f"  rank {side.rank}: {call}" for side in self.sides for call in side.before
        ]


class Calls:
    """What the ranks that ran have called."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self._logs = {log.rank: log for log in sorted(logs, key=lambda log: log.rank)}
        self.of: dict[int, list[Entry]] = {}
        self.on: dict[Communicator, dict[int, list[Entry]]] = {}
        for rank, log in self._logs.items():
            self.of[rank] = [Entry(call, i) for i, call in enumerate(log.calls, 1)]
            for entry in self.of[rank]:
                self._on(entry.call.communicator)[rank].append(entry)

    def _on(self, communicator: Communicator) -> dict[int, list[Entry]]:
        if communicator not in self.on:
            present = [rank for rank in self._logs if rank in communicator.ranks]
            self.on[communicator] = {rank: [] for rank in present}
        return self.on[communicator]

    def shared(self) -> list[Communicator]:
        return [each for each, of_ranks in self.on.items() if len(of_ranks) > 1]

    def have_pairs(self, communicator: Communicator) -> bool:
        entries = chain.from_iterable(self.on[communicator].values())
        return any(entry.call.is_of_pair for entry in entries)

    def alike(self, communicator: Communicator) -> bool:
        """Each rank has the same collectives there, in the same order."""
        lists = (
            tuple(each.call.signature for each in entries if not each.call.is_of_pair)
            for entries in self.on[communicator].values()
        )
        return len(set(lists)) == 1

    def between(
        self,
        at: Mapping[int, Entry | None],
        difference: Difference = Difference.CALLS,
    ) -> Divergence:
        sides = (self._side(rank, entry) for rank, entry in sorted(at.items()))
        return Divergence(tuple(sides), difference)

    def _side(self, rank: int, entry: Entry | None) -> Side:
        calls = self._logs[rank].calls
        end = len(calls) if entry is None else entry.number - 1
        return Side(rank, entry, calls[max(0, end - _SHOWN_BEFORE) : end])
