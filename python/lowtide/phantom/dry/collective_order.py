"""Collectives of several ranks, replayed on all communicators at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from .call_logs import Call, Communicator
from .divergences import Calls, Difference, Divergence, Entry


class Replay:
    """Plays collectives on all communicators at once."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._members = {each: calls.on[each].keys() for each in calls.shared()}
        self._ahead = {
            rank: [entry for entry in reversed(entries) if self._is_awaited(entry)]
            for rank, entries in calls.of.items()
        }
        # Ranks that have come to a call on it.
        self._waiting: dict[Communicator, list[int]] = defaultdict(list)
        self._mixed: dict[Communicator, Divergence] = {}  # the first on each

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
            self._look_at_units(communicator, here)
            for each in self._waiting.pop(communicator):
                self._ahead[each].pop()
                if self._ahead[each]:
                    arriving.append(each)
        stuck = [rank for rank, entries in self._ahead.items() if entries]
        return [*map(self._cause, stuck), *self._mixed.values()]

    def _look_at_units(self, on: Communicator, ranks: Sequence[int]) -> None:
        if on in self._mixed or len({self._call(rank).unit for rank in ranks}) == 1:
            return
        two = _one_of_most_and_one_of_others(ranks, lambda rank: self._call(rank).unit)
        self._mixed[on] = self._between(two, Difference.UNITS)

    def _at(self, rank: int) -> Entry | None:
        return self._ahead[rank][-1] if self._ahead[rank] else None

    def _call(self, rank: int) -> Call:
        return self._ahead[rank][-1].call

    def _differ(self, ranks: Iterable[int]) -> bool:
        return len({self._call(rank).signature for rank in ranks}) > 1

    def _cause(self, rank: int) -> Divergence:
        """Why a rank waits: two have come to different calls on a communicator, one
        asks nothing more, or some wait for each other in a circle."""
        waiting = [rank]
        while True:
            on = self._call(waiting[-1]).communicator
            here = sorted(self._waiting[on])
            if self._differ(here):
                two = _one_of_most_and_one_of_others(
                    here, lambda rank: self._call(rank).signature
                )
                return self._between(two)
            awaited = next(each for each in self._members[on] if each not in here)
            if not self._ahead[awaited]:
                return self._between([here[0], awaited])
            if awaited in waiting:
                circle = waiting[waiting.index(awaited) :]
                communicators = [self._call(each).communicator for each in circle]
                alike = all(map(self._calls.alike, communicators))
                difference = Difference.ORDER if alike else Difference.CALLS
                return self._between(circle, difference)
            waiting.append(awaited)

    def _between(
        self, ranks: Sequence[int], difference: Difference = Difference.CALLS
    ) -> Divergence:
        return self._calls.between({rank: self._at(rank) for rank in ranks}, difference)


def _one_of_most_and_one_of_others(
    ranks: Iterable[int], what: Callable[[int], object]
) -> list[int]:
    alike: dict[object, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        alike[what(rank)].append(rank)
    by_number = sorted(alike.values(), key=lambda each: -len(each))
    return [by_number[0][0], by_number[1][0]]
