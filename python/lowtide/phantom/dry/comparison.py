"""Finds where ranks would wait for each other without end, by what each asked of NCCL.

A collective takes place when every rank of its communicator has come to it. So the
calls of ranks that really run are replayed here: first on each communicator alone,
where every rank must come to the same calls in the same order, then on all of them at
once, where a rank waits for one call before it comes to the next, whatever
communicator that is on. Ranks that did not run are taken to do what is expected.

Sends and receives meet in pairs, those of one group of NCCL's in any order. They are
ordered with other calls on their communicator, and with no others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .call_logs import Call, Communicator, Log, shown

_SHOWN_BEFORE = 3


@dataclass(frozen=True)
class Entry:
    """A call in the log of its rank; numbers are from 1 on, over all communicators and
    on its own."""

    call: Call
    number: int
    on_communicator: int


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

    def context(self) -> str:
        return "\n".join(f"  rank {self.rank}: {call}" for call in self.before)


@dataclass(frozen=True)
class Divergence:
    """Ranks that would wait for each other. ``communicator``: on which their calls
    differ; None where they are the same, but in another order over several."""

    communicator: Communicator | None
    sides: tuple[Side, ...]

    @property
    def first(self) -> int:
        """The number of the earliest call."""
        return min(side.entry.number for side in self.sides if side.entry)

    def __str__(self) -> str:
        ranks = shown(tuple(sorted(side.rank for side in self.sides)))
        if self.communicator is None:
            got = "the same calls of NCCL in another order over their communicators"
        else:
            places = [side.entry for side in self.sides if side.entry]
            place = min(entry.on_communicator for entry in places)
            got = f"different ones on {self.communicator}, as call {place} there"
        parts = [
            f"lowtide: {ranks}: expected the same calls of NCCL in the same order, got "
            f"{got}:",
            *map(str, self.sides),
        ]
        if any(side.before for side in self.sides):
            before = (side.context() for side in self.sides if side.before)
            parts += ["before that:", *before]
        parts.append(
            "On GPUs each would wait for the other without end. Let every rank decide "
            "alike about these calls and their order."
        )
        return "\n".join(parts)


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
    """On each communicator the first one, the earliest before others; where there are
    none, at most one of the order over all of them."""
    calls = _Calls(logs)
    found = [
        divergence
        for communicator in calls.shared()
        if (divergence := _Meeting(calls, communicator).divergence())
    ]
    if not found and (divergence := _order(calls)):
        found.append(divergence)
    return sorted(found, key=lambda each: each.first)


class _Calls:
    """Of the ranks that ran."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self._logs = {log.rank: log for log in logs}
        self.entries: dict[int, list[Entry]] = {}
        self.on: dict[Communicator, dict[int, list[Entry]]] = {}
        for log in logs:
            self.entries[log.rank] = []
            for number, call in enumerate(log.calls, 1):
                of_rank = self._on(call.communicator).setdefault(log.rank, [])
                entry = Entry(call, number, len(of_rank) + 1)
                of_rank.append(entry)
                self.entries[log.rank].append(entry)

    def _on(self, communicator: Communicator) -> dict[int, list[Entry]]:
        if communicator not in self.on:
            present = [rank for rank in communicator.ranks if rank in self._logs]
            self.on[communicator] = {rank: [] for rank in present}
        return self.on[communicator]

    def shared(self) -> list[Communicator]:
        return [each for each, of_ranks in self.on.items() if len(of_ranks) > 1]

    def side(self, rank: int, entry: Entry | None) -> Side:
        calls = self._logs[rank].calls
        end = len(calls) if entry is None else entry.number - 1
        return Side(rank, entry, calls[max(0, end - _SHOWN_BEFORE) : end])


class _Meeting:
    """The ranks of one communicator; what is ahead of each are steps, which are a
    collective, or sends and receives that NCCL takes together."""

    def __init__(self, calls: _Calls, communicator: Communicator) -> None:
        self._calls = calls
        self._communicator = communicator
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

    def _collective(self) -> bool:
        heads = [self._next(rank) for rank in self._ahead]
        if not all(head and not head[0].call.is_of_pair for head in heads):
            return False
        if len({head[0].call.signature for head in heads}) > 1:
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
                    ends = sorted(
                        [(rank, entry), (peer, other)], key=lambda end: end[0]
                    )
                    sides = tuple(self._calls.side(*end) for end in ends)
                    return Divergence(self._communicator, sides)
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
        collectives: dict[object, list[int]] = defaultdict(list)
        for rank in self._ahead:
            head = self._next(rank)
            if head and not head[0].call.is_of_pair:
                collectives[head[0].call.signature].append(rank)
        by_number = sorted(collectives.values(), key=lambda ranks: -len(ranks))
        if len(by_number) > 1:
            return self._between([ranks[0] for ranks in by_number[:2]])
        chain = [next(rank for rank in self._ahead if self._next(rank))]
        while True:
            awaited = self._awaited(chain[-1])
            if not self._next(awaited):
                return self._between([chain[-1], awaited])
            if awaited in chain:
                return self._between(chain[chain.index(awaited) :])
            chain.append(awaited)

    def _awaited(self, rank: int) -> int:
        """By a rank that is stuck."""
        call = self._next(rank)[0].call
        if call.is_of_pair:
            assert call.peer is not None
            return call.peer
        return next(
            other
            for other in self._ahead
            if not self._next(other) or self._next(other)[0].call.is_of_pair
        )

    def _towards(self, rank: int, ranks: Sequence[int]) -> Entry | None:
        """What it is at; of several sends and receives one with the other rank."""
        head = self._next(rank)
        meant = [entry for entry in head if entry.call.peer in ranks]
        return next(iter(meant or head), None)

    def _between(self, ranks: Sequence[int]) -> Divergence:
        sides = (self._calls.side(r, self._towards(r, ranks)) for r in sorted(ranks))
        return Divergence(self._communicator, tuple(sides))


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


def _order(calls: _Calls) -> Divergence | None:
    """Of collectives on all communicators at once."""
    shared = {each: calls.on[each].keys() for each in calls.shared()}
    ahead = {
        rank: [
            entry
            for entry in reversed(entries)
            if entry.call.communicator in shared and not entry.call.is_of_pair
        ]
        for rank, entries in calls.entries.items()
    }
    waiting: dict[Communicator, set[int]] = defaultdict(set)
    arriving = [rank for rank, entries in ahead.items() if entries]
    while arriving:
        rank = arriving.pop()
        communicator = ahead[rank][-1].call.communicator
        waiting[communicator].add(rank)
        if len(waiting[communicator]) == len(shared[communicator]):
            for each in waiting.pop(communicator):
                ahead[each].pop()
                if ahead[each]:
                    arriving.append(each)
    at = {rank: entries[-1] for rank, entries in ahead.items() if entries}
    if not at:
        return None
    chain = [min(at)]
    while True:
        on = at[chain[-1]].call.communicator
        # Its calls are the same on each rank, so one that is not there is elsewhere.
        awaited = next(rank for rank in shared[on] if rank not in waiting[on])
        if awaited in chain:
            cycle = chain[chain.index(awaited) :]
            return Divergence(None, tuple(calls.side(r, at[r]) for r in sorted(cycle)))
        chain.append(awaited)
