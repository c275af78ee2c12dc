"""Sends and receives of several ranks, replayed on a communicator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .call_logs import Call, Communicator
from .divergences import Calls, Divergence, Entry


class Meeting:
    """The ranks of one communicator with sends and receives; what is ahead of each are
    steps, which are a collective, or sends and receives that NCCL takes together."""

    def __init__(self, calls: Calls, communicator: Communicator) -> None:
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
