"""Finds where ranks would wait for each other without end, by what each asked of NCCL.

A collective takes place when every rank of its communicator has come to it. So the
calls of the ranks that ran are replayed here, each rank waiting for one call before it
comes to the next, whatever communicator that is on. Ranks that did not run are taken to
do what is expected.

Sends and receives meet in pairs, those of one group of NCCL's in any order. They are
ordered with other calls on their communicator, and with no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .call_logs import Log
from .collective_order import Replay
from .divergences import Calls, Divergence
from .pair_order import Meeting


@dataclass(frozen=True)
class Verdict:
    """Counts are of what at least two of the ranks that ran share; a collective is one
    call."""

    num_calls: int
    num_communicators: int
    divergences: list[Divergence]

    @classmethod
    def of(cls, logs: Sequence[Log]) -> Verdict:
        calls = Calls(logs)
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
                {
                    "difference": each.difference.name.lower(),
                    "sides": [asdict(side) for side in each.sides],
                    "message": str(each),
                }
                for each in self.divergences
            ],
        }


def compare(logs: Sequence[Log]) -> list[Divergence]:
    """The earliest first; each rank is in one at most. Sends and receives are looked at
    where all else agrees. What a rank that failed would have asked next is not known,
    and nothing is said of it."""
    calls = Calls(logs)
    found = Replay(calls).divergences()
    if not found:
        shared = filter(calls.have_pairs, calls.shared())
        meetings = (Meeting(calls, each) for each in shared)
        found = [each for meeting in meetings if (each := meeting.divergence())]
    failed = {log.rank for log in logs if not log.complete}
    known = [
        each
        for each in found
        if not any(side.entry is None and side.rank in failed for side in each.sides)
    ]
    return _apart(sorted(known, key=lambda each: each.first))


def _apart(divergences: Iterable[Divergence]) -> list[Divergence]:
    """Without those of ranks that are in an earlier one."""
    found: list[Divergence] = []
    ranks: set[int] = set()
    for each in divergences:
        of_it = {side.rank for side in each.sides}
        if not ranks & of_it:
            found.append(each)
            ranks |= of_it
    return found
