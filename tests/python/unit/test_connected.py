"""Ranks find all that their meshes connect, in any order of their threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lowtide._sharding.connected import connected

Ranks = tuple[int, ...]


class Meeting:
    """A channel of ranks that are threads."""

    def __init__(self, ranks: Ranks) -> None:
        self.size = len(ranks)
        self.changed = threading.Condition()
        self.rounds: list[list[list[int]]] = []
        self.sent = dict.fromkeys(ranks, 0)

    def of(self, rank: int) -> Channel:
        return Channel(self, rank)


class Channel:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def maximum(self, numbers: list[int]) -> Answer:
        meeting = self.meeting
        with meeting.changed:
            number = meeting.sent[self.rank]
            meeting.sent[self.rank] += 1
            if number == len(meeting.rounds):
                meeting.rounds.append([])
            meeting.rounds[number].append(numbers)
            meeting.changed.notify_all()
        return Answer(meeting, number)


class Answer:
    def __init__(self, meeting: Meeting, number: int) -> None:
        self.meeting, self.number = meeting, number

    def wait(self) -> list[int]:
        meeting = self.meeting
        with meeting.changed:
            sent = meeting.rounds[self.number]
            assert meeting.changed.wait_for(
                lambda: len(sent) == meeting.size, timeout=60
            ), "a rank ended earlier than another of its mesh"
        return [max(column) for column in zip(*sent, strict=True)]


def runs(world: int, number: int, step: int = 1) -> list[Ranks]:
    """Meshes of so many ranks, of which each is that far from the next."""
    return [
        tuple(first + offset + step * i for i in range(number))
        for first in range(0, world, number * step)
        for offset in range(step)
    ]


# Meshes, and what they connect. Of two units of a model each has one on every rank.
CASES: dict[str, tuple[list[Ranks], list[Ranks]]] = {
    "one mesh": ([(0, 1, 2)], [(0, 1, 2)]),
    "one in the other": (runs(8, 2, 4) + runs(8, 4, 2), runs(8, 4, 2)),
    "experts of each rank": (runs(4, 1) + runs(4, 4), runs(4, 4)),
    "rows and columns": (runs(6, 3, 2) + runs(6, 2, 3), runs(6, 6)),
    "a chain": (
        [*((i, i + 1) for i in range(11)), (0,), (11,)],
        runs(12, 12),
    ),
    "a chain and a pair": (
        [(0, 4), (2, 5), (1, 3), (0, 2), (4,), (5,)],
        [(0, 2, 4, 5), (1, 3)],
    ),
    "three kinds": (runs(8, 2) + runs(8, 2, 2) + runs(8, 2, 4), runs(8, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_meshes_connect(case):
    meshes, expected = CASES[case]
    channels = {mesh: Meeting(mesh) for mesh in meshes}
    world = 1 + max(map(max, meshes))

    def of(rank: int) -> Ranks:
        mine: Any = {
            mesh: channel.of(rank) for mesh, channel in channels.items() if rank in mesh
        }
        return connected(rank, world, mine)

    with ThreadPoolExecutor(world) as threads:
        for rank, found in enumerate(threads.map(of, range(world))):
            assert found == next(ranks for ranks in expected if rank in ranks)
    rounds = max(len(meeting.rounds) for meeting in channels.values())
    assert (rounds == 0) == (len(meshes) == 1)
    if case in ("one in the other", "experts of each rank"):
        assert rounds <= 2


def test_alone_a_rank_takes_those_of_its_own_meshes():
    class Echo:
        def __init__(self, numbers: list[int] | None = None) -> None:
            self.numbers = numbers

        def maximum(self, numbers: list[int]) -> Echo:
            return Echo(numbers)

        def wait(self) -> list[int] | None:
            return self.numbers

    channels: Any = {(0, 4): Echo(), (0, 2, 4, 6): Echo()}
    assert connected(0, 8, channels) == (0, 2, 4, 6)
