"""torchao's float8 recipes dry on an H100, with its products of eight bits: what ranks
exchange, and memory, beside FSDP2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "train_float8.py"
STEPS, BLOCKS = 3, 4  # the script's


def dry(system: str, recipe: str) -> Any:
    options = "-m lowtide phantom --world 4 --ranks 0-1 --json - --".split()
    words = [sys.executable, "-W", "ignore", *options, str(SCRIPT), system, recipe]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["nccl"]["divergences"] == []
    return found["ranks"]["0"]


# The ranks, the kind, the reduction, bytes.
Event = tuple[tuple[int, ...], str, str, int]
OF_UNITS = ("all_gather", "reduce_scatter")


def issued(report: Any) -> list[Event]:
    """But what lowtide's ranks compare: how many weights are gathered, and norms."""
    ranks = {each["number"]: tuple(each["ranks"]) for each in report["communicators"]}
    return [
        (ranks[c["communicator"]], c["kind"], c["reduction"], c["bytes"])
        for c in report["calls"]
        if c["kind"] in ("all_reduce", *OF_UNITS)
        and not (c["kind"] == "all_gather" and c["bytes"] < 512)
    ]


def by_units(calls: list[Event], like: list[Event]) -> list[Event]:
    """What belongs to one unit, of which ``like`` has one call each, as one call where
    its last part is. Of a reduction each rank's part is padded to 512 bytes."""
    expected: dict[str, list[int]] = {
        kind: [event[-1] for event in like if event[1] == kind] for kind in OF_UNITS
    }
    parts: dict[str, list[int]] = {kind: [] for kind in OF_UNITS}
    found = []
    for ranks, kind, reduction, size in calls:
        if kind in OF_UNITS:
            parts[kind].append(size)
            wanted = expected[kind][0]
            if sum(parts[kind]) < wanted:
                continue
            count = len(parts[kind]) if kind == "reduce_scatter" else 0
            assert sum(parts[kind]) - wanted <= 512 * len(ranks) * count
            parts[kind], size = [], expected[kind].pop(0)
        found.append((ranks, kind, reduction, size))
    assert not any(parts.values()) and not any(expected.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_ranks_issue_what_fsdp2_issues_in_its_order(recipe):
    """But that the first forward agrees on the scales of all units before it gathers
    one, and FSDP2 on each unit's before that one's gather."""
    ours, theirs = dry("lowtide", recipe), dry("fsdp2", recipe)
    other = issued(theirs)
    mine = by_units(issued(ours), other)
    gathers = [at for at, event in enumerate(other) if event[1] == "all_gather"]
    begun = gathers[BLOCKS - 1] + 1
    assert sorted(mine[:begun]) == sorted(other[:begun])
    assert mine[begun:] == other[begun:]
    assert [e[1] for e in other].count("reduce_scatter") == STEPS * BLOCKS
    (here,), (there,) = ours["devices"], theirs["devices"]
    assert here["reserved"] < there["reserved"]
