"""What one rank asked of NCCL, as another process reads it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A process does these alone.
_LOCAL = ("register", "mem_alloc")
_PAIRS = ("send", "recv")
_OF_UNITS = ("FSDP::", "lowtide::")


@dataclass(frozen=True)
class Communicator:
    """What is equal on each of its ranks: the group's name, its ranks of the world, and
    how many of that name and those ranks were made before it."""

    name: str
    ranks: tuple[int, ...]
    nth: int = 0
    purpose: str = field(default="", compare=False)  # what torch calls the group

    def __str__(self) -> str:
        called = "" if self.purpose in ("", "undefined", "default_pg") else self.purpose
        return f"{called or 'the group'} of {shown(self.ranks)}"


@dataclass(frozen=True)
class Call:
    """``bytes`` are what a rank gives (csrc/phantom/driver/collective_log.h); ``peer``
    is the root, or who is at the other end, by rank in the world; ``group`` numbers the
    calls that NCCL takes together (ncclGroupStart), 0 is none."""

    communicator: Communicator
    kind: str
    bytes: int = 0
    type: str = "-"
    reduction: str = "-"
    peer: int | None = None
    group: int = 0
    where: str = ""
    node: str = ""
    range: str = ""
    operation: str = ""

    @property
    def is_of_pair(self) -> bool:
        return self.kind in _PAIRS

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the ranks of a collective must agree on."""
        return self.kind, self.bytes, self.type, self.reduction, self.peer

    @property
    def unit(self) -> str:
        """FSDP2's and lowtide's ranges name it."""
        return self.range if self.range.startswith(_OF_UNITS) else ""

    def __str__(self) -> str:
        has_name = self.operation in ("barrier", "send_object_list")
        text = self.operation if has_name else self.kind
        if self.bytes:
            text += f" of {self.bytes:,} B {self.type}"
        if self.reduction != "-":
            text += f", {self.reduction},"
        if self.peer is not None:
            how = {"send": "to", "recv": "from"}.get(self.kind, "with root")
            text += f" {how} rank {self.peer}"
        text += f" on {self.communicator}"
        if self.range:
            text += f", in {self.range}"
        if self.node:
            text += f", in backward ({self.node})"
        return f"{text}, at {_short(self.where)}" if self.where else text


@dataclass(frozen=True)
class Log:
    """Calls on communicators whose group has a name; what a process does alone is left
    out. ``complete``: the program did not fail."""

    rank: int
    calls: tuple[Call, ...]
    complete: bool = True

    @classmethod
    def of(cls, rank: int, report: Mapping[str, Any], *, complete: bool = True) -> Log:
        """``report``: of :func:`.calls.collect`."""
        communicators = {}
        made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for each in report["communicators"]:
            key = each["name"], tuple(each["ranks"])
            if each["name"]:
                communicators[each["number"]] = Communicator(
                    *key, made[key], each["purpose"]
                )
            made[key] += 1
        return cls(
            rank,
            tuple(
                _call(call, communicators[call["communicator"]])
                for call in report["calls"]
                if call["communicator"] in communicators and call["kind"] not in _LOCAL
            ),
            complete,
        )


def _call(fields: Mapping[str, Any], communicator: Communicator) -> Call:
    names = ("kind", "bytes", "type", "reduction", "group")
    around = ("where", "node", "range", "operation")
    peer = fields["peer"]
    return Call(
        communicator,
        peer=None if peer < 0 else communicator.ranks[peer],
        **{name: fields[name] for name in names + around},
    )


def _short(where: str) -> str:
    """From the current folder, if it is in there."""
    here = os.getcwd() + os.sep
    return where.removeprefix(here)


def shown(ranks: tuple[int, ...]) -> str:
    """``rank 3``, ``ranks 0 and 1``, ``ranks 0-7``, ``ranks 1, 5, ..., 29``."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    if len(ranks) == 2:
        return f"ranks {first} and {last}"
    for step in (1, ranks[1] - first):
        if step > 0 and ranks == tuple(range(first, last + 1, step)):
            if step == 1:
                return f"ranks {first}-{last}"
            if len(ranks) > 3:
                return f"ranks {first}, {ranks[1]}, ..., {last}"
    return f"ranks {', '.join(map(str, ranks))}"
