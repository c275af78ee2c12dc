"""Finds where ranks would wait for each other without end, by what each asked of NCCL.

A collective takes place when every rank of its communicator has come to it. So the
calls of the ranks that ran are replayed here, each rank waiting for one call before it
comes to the next, whatever communicator that is on. Ranks that did not run are taken to
do what is expected.

Sends and receives meet in pairs, those of one group of NCCL's in any order. They are
ordered with other calls on their communicator, and with no others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

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


@dataclass(frozen=True)
class Divergence:
    """Ranks that would wait for each other. ``reordered``: on each communicator their
    calls are the same."""

    sides: tuple[Side, ...]
    reordered: bool = False

    @property
    def first(self) -> int:
        """The number of the earliest call."""
        return min(side.entry.number for side in self.sides if side.entry)

    def __str__(self) -> str:
        ranks = shown(tuple(side.rank for side in self.sides))
        got = "another order over their communicators" if self.reordered else "others"
        parts = [
            f"lowtide: {ranks}: expected the same calls of NCCL in the same order, got "
            f"{got}:",
            *map(str, self.sides),
        ]
        if any(side.before for side in self.sides):
            parts += ["before that:", *self._before()]
        parts.append(
            "On GPUs they would wait for each other without end. Let every rank decide "
            "alike about these calls and their order."
        )
        return "\n".join(parts)

    def _before(self) -> list[str]:
        first = self.sides[0]
        if all(side.is_behind_the_same(first) for side in self.sides):
            return [f"  each: {call}" for call in first.before]
        return [
            f"  rank {side.rank}: {call}" for side in self.sides for call in side.before
        ]


@dataclass(frozen=True)
class Verdict:
    """Counts are of what at least two of the ranks that ran share; a collective is one
    call."""

    num_calls: int
    num_communicators: int
    divergences: list[Divergence]

    @classmethod
    def of(cls, logs: Sequence[Log]) -> Verdict:
        calls = _Calls(logs)
        shared = calls.shared()
        counts = [max(map(len, calls.on[each].values())) for each in shared]
        return cls(sum(counts), len(shared), compare(logs))

    def __str__(self) -> str:
        """``calls agree (96 calls, 4 communicators)``"""
        how = "differ" if self.divergences else "agree"
        return (
            f"calls {how} ({self.num_calls} calls, {self.num_communicators} "
            "communicators)"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.num_calls,
            "communicators": self.num_communicators,
            "divergences": [
                asdict(each) | {"message": str(each)} for each in self.divergences
            ],
        }


def compare(logs: Sequence[Log]) -> list[Divergence]:
    """The earliest first; each rank is in one at most. Sends and receives are looked at
    where all else agrees."""
    calls = _Calls(logs)
    found = _Replay(calls).divergences()
    if not found:
        shared = filter(calls.have_pairs, calls.shared())
        meetings = (_Meeting(calls, each) for each in shared)
        found = [each for meeting in meetings if (each := meeting.divergence())]
    return sorted(found, key=lambda each: each.first)


class _Calls:
    """Of the ranks that ran."""

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
        self, at: Mapping[int, Entry | None], *, reordered: bool = False
    ) -> Divergence:
        sides = (self._side(rank, entry) for rank, entry in sorted(at.items()))
        return Divergence(tuple(sides), reordered)

    def _side(self, rank: int, entry: Entry | None) -> Side:
        calls = self._logs[rank].calls
        end = len(calls) if entry is None else entry.number - 1
        return Side(rank, entry, calls[max(0, end - _SHOWN_BEFORE) : end])


class _Replay:
    """Of collectives, on all communicators at once."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._members = {each: calls.on[each].keys() for each in calls.shared()}
        self._ahead = {
            rank: [entry for entry in reversed(entries) if self._is_awaited(entry)]
            for rank, entries in calls.of.items()
        }
        # Ranks that have come to a call on it.
        self._waiting: dict[Communicator, list[int]] = defaultdict(list)

    def _is_awaited(self, entry: Entry) -> bool:
        call = entry.call
        return call.communicator in self._members and not call.is_of_pair

    def divergences(self) -> list[Divergence]:
        arriving = [rank for rank, entries in self._ahead.items() if entries]
        while arriving:
            communicator = self._call(rank := arriving.pop()).communicator
            here = self._waiting[communicator]
            here.append(rank)
            if len(here) < len(self._members[communicator]) or self._differ(here):
                continue
            for each in self._waiting.pop(communicator):
                self._ahead[each].pop()
                if self._ahead[each]:
                    arriving.append(each)
        found: dict[frozenset[int], Divergence] = {}
        for rank, entries in self._ahead.items():
            if entries:
                cause = self._cause(rank)
                ranks = frozenset(side.rank for side in cause.sides)
                if not any(ranks & others for others in found):
                    found[ranks] = cause
        return list(found.values())

    def _at(self, rank: int) -> Entry | None:
        return self._ahead[rank][-1] if self._ahead[rank] else None

    def _call(self, rank: int) -> Call:
        return self._ahead[rank][-1].call

    def _differ(self, ranks: Iterable[int]) -> bool:
        return len({self._call(rank).signature for rank in ranks}) > 1

    def _cause(self, rank: int) -> Divergence:
        """Of a rank's waiting: two that have come to different calls on a communicator,
        one that asks nothing more, or some that wait for each other in a circle."""
        waiting = [rank]
        while True:
            on = self._call(waiting[-1]).communicator
            here = sorted(self._waiting[on])
            if self._differ(here):
                return self._between(_one_of_most_and_one_of_others(here, self._call))
            awaited = next(each for each in self._members[on] if each not in here)
            if not self._ahead[awaited]:
                return self._between([here[0], awaited])
            if awaited in waiting:
                return self._between(waiting[waiting.index(awaited) :], circle=True)
            waiting.append(awaited)

    def _between(self, ranks: Sequence[int], *, circle: bool = False) -> Divergence:
        reordered = circle and all(
            self._calls.alike(self._call(rank).communicator) for rank in ranks
        )
        at = {rank: self._at(rank) for rank in ranks}
        return self._calls.between(at, reordered=reordered)


def _one_of_most_and_one_of_others(
    ranks: Sequence[int], call: Callable[[int], Call]
) -> list[int]:
    alike: dict[object, list[int]] = defaultdict(list)
    for rank in ranks:
        alike[call(rank).signature].append(rank)
    by_number = sorted(alike.values(), key=lambda each: -len(each))
    return [by_number[0][0], by_number[1][0]]


class _Meeting:
    """The ranks of one communicator with sends and receives; what is ahead of each are
    steps, which are a collective, or sends and receives that NCCL takes together."""

    def __init__(self, calls: _Calls, communicator: Communicator) -> None:
        self._calls = calls
        present = calls.on[communicator]
        self._ahead = {
            rank: _steps(entries, present)[::-1] for rank, entries in present.items()
        }

    def divergence(self) -> Divergence | None:
        while any(self._ahead.values()):
            moved = self._collective() or self._pairs()
            if isinstance(moved, Divergence):
                return moved
            if not moved:
                return self._stuck()
        return None

    def _next(self, rank: int) -> list[Entry]:
        return self._ahead[rank][-1] if self._ahead[rank] else []

    def _is_at_collective(self, rank: int) -> bool:
        step = self._next(rank)
        return bool(step) and not step[0].call.is_of_pair

    def _collective(self) -> bool:
        """They are the same on each rank: that has been looked at."""
        if not all(self._is_at_collective(rank) for rank in self._ahead):
            return False
        for steps in self._ahead.values():
            steps.pop()
        return True

    def _pairs(self) -> bool | Divergence:
        moved = False
        for rank in self._ahead:
            for entry in list(self._next(rank)):
                other = self._other_end(rank, entry)
                if other is None or entry not in self._next(rank):
                    continue
                peer = entry.call.peer
                assert peer is not None
                if not _fit(entry.call, other.call):
                    return self._calls.between({rank: entry, peer: other})
                self._next(rank).remove(entry)
                self._next(peer).remove(other)
                moved = True
        for steps in self._ahead.values():
            if steps and not steps[-1]:
                steps.pop()
        return moved

    def _other_end(self, rank: int, entry: Entry) -> Entry | None:
        """The send's receive and the other way round, if its rank has come to it."""
        wanted = {"send": "recv", "recv": "send"}.get(entry.call.kind)
        peer = entry.call.peer
        if wanted is None or peer not in self._ahead:
            return None
        for other in self._next(peer):
            if other.call.kind == wanted and other.call.peer == rank:
                return other
        return None

    def _stuck(self) -> Divergence:
        waiting = [next(rank for rank in self._ahead if self._next(rank))]
        while True:
            awaited = self._awaited(waiting[-1])
            if not self._next(awaited):
                return self._between([waiting[-1], awaited])
            if awaited in waiting:
                return self._between(waiting[waiting.index(awaited) :])
            waiting.append(awaited)

    def _awaited(self, rank: int) -> int:
        """By a rank that is stuck."""
        if self._is_at_collective(rank):
            return next(r for r in self._ahead if not self._is_at_collective(r))
        peer = self._next(rank)[0].call.peer
        assert peer is not None
        return peer

    def _between(self, ranks: Sequence[int]) -> Divergence:
        return self._calls.between({rank: self._towards(rank, ranks) for rank in ranks})

    def _towards(self, rank: int, ranks: Sequence[int]) -> Entry | None:
        """What it is at; of several sends and receives one with the other ranks."""
        step = self._next(rank)
        meant = [entry for entry in step if entry.call.peer in ranks]
        return next(iter(meant or step), None)


def _steps(
    entries: Iterable[Entry], present: Mapping[int, object]
) -> list[list[Entry]]:
    """Without sends and receives whose other end did not run."""
    steps: list[list[Entry]] = []
    groups: dict[int, list[Entry]] = {}
    for entry in entries:
        call = entry.call
        if not call.is_of_pair:
            steps.append([entry])
        elif call.peer in present:
            if call.group in groups:
                groups[call.group].append(entry)
                continue
            steps.append([entry])
            if call.group:
                groups[call.group] = steps[-1]
    return steps


def _fit(one: Call, other: Call) -> bool:
    """How much each rank gives another in an all-to-all depends on data, which does
    not travel between ranks here."""
    if one.operation.startswith("all_to_all") and one.operation == other.operation:
        return one.type == other.type
    return (one.bytes, one.type) == (other.bytes, other.type)
