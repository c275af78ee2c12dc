"""Reads callgrind's profiles: instructions in all, and inside one class.

A profile is a text file: `fn=` opens a function, a line of numbers is its own
cost, and `calls=` is followed by the line with the inclusive cost of what the
function opened by `cfn=` was called for.  Names are given once and then by
number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NAME = re.compile(r"^(c?fn)=\((\d+)\)(?: (.*))?$")
# A position (a line number, "+3", "-3" or "*") and the cost.
COST = re.compile(r"^(?:\+|-)?(?:\d+|\*) (\d+)$")
RECURSIVE = re.compile(r"'\d+$")


def total(lines: Iterable[str]) -> int:
    for line in lines:
        if line.startswith(("summary:", "totals:")):
            return int(line.split()[1])
    raise ValueError("callgrind: expected a summary line, got none.")


def inside(lines: Iterable[str], prefix: str) -> int:
    """Instructions below the outermost calls of functions named `prefix`..."""
    return sum(
        cost
        for caller, callee, cost in calls(lines)
        if callee.startswith(prefix) and not caller.startswith(prefix)
    )


def calls(lines: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Caller, callee and inclusive cost of every call."""
    names: dict[str, str] = {}
    here = {"fn": "", "cfn": ""}
    is_call = False
    for line in lines:
        line = line.rstrip("\n")
        if match := NAME.match(line):
            kind, number, name = match.groups()
            if name is not None:
                names[number] = RECURSIVE.sub("", name)
            here[kind] = names[number]
        elif line.startswith("calls="):
            is_call = True
        elif is_call and (cost := COST.match(line)):
            yield here["fn"], here["cfn"], int(cost.group(1))
            is_call = False
