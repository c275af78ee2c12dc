"""Instructions that sharding adds to a unit, by callgrind."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

import callgrind
from case import Case, Row, rows_of
from host_instructions import ENTRY, NUM_LAYERS, NUM_STEPS
from host_models import SYSTEMS
from launch import run

NAME = "host_instructions"
PHASES = ("forward", "backward")
GROUP = "c10d::FakeProcessGroup::"
AIM = 0.15
CALLGRIND = (
    "valgrind",
    "--tool=callgrind",
    "--collect-atstart=no",
    f"--toggle-collect={ENTRY}",
    f"--dump-after={ENTRY}",
    "--callgrind-out-file=profile",
)
NO_VALGRIND = "valgrind was not found: `apt install valgrind`, then run the case again"
IN_GROUP = (
    "the fake group copies a unit's gathered buffer once per rank, for both systems "
    "alike; a real group does not run this"
)

# Instructions per unit by phase: all, and those inside the process group.
Costs = dict[str, tuple[float, float]]


def measure() -> list[Row]:
    if shutil.which("valgrind") is None:
        return [rows_of(NAME)("lowtide", TOTAL, None, "M", "missing", NO_VALGRIND)]
    return rows({system: instructions(system) for system in SYSTEMS})


def instructions(system: str) -> Costs:
    with tempfile.TemporaryDirectory(prefix="callgrind-") as directory:
        run(
            "host_instructions.py",
            system,
            under=CALLGRIND,
            directory=Path(directory),
            timeout=1800,
        )
        return read(Path(directory))


def read(directory: Path) -> Costs:
    """Profiles profile.1, profile.2, ... are forward, backward, forward, ..."""
    costs = {}
    for place, phase in enumerate(PHASES):
        steps = range(NUM_STEPS)
        files = [directory / f"profile.{2 * step + place + 1}" for step in steps]
        texts = [file.read_text().splitlines() for file in files]
        units = NUM_LAYERS + 1
        costs[phase] = (
            statistics.median(callgrind.total(text) for text in texts) / units,
            statistics.median(callgrind.inside(text, GROUP) for text in texts) / units,
        )
    return costs


TOTAL = "instructions per unit"
OUTSIDE = "instructions per unit outside the process group"


def rows(costs: dict[str, Costs]) -> list[Row]:
    row = rows_of(NAME)
    result = []
    sums: dict[str, dict[str, float]] = {}
    for system in ("lowtide", "fsdp2"):
        added = {
            phase: costs[system][phase][0] - costs["plain"][phase][0]
            for phase in PHASES
        }
        group = {phase: costs[system][phase][1] for phase in PHASES}
        whole, in_group = sum(added.values()), sum(group.values())
        sums[system] = {TOTAL: whole, OUTSIDE: whole - in_group}
        figures = {
            **{f"{TOTAL}, {phase}": added[phase] for phase in PHASES},
            TOTAL: whole,
            "of these inside the process group": in_group,
            OUTSIDE: whole - in_group,
        }
        for quantity, value in figures.items():
            note = IN_GROUP if value is in_group and system == "lowtide" else ""
            millions = round(value / 1e6, 3)
            result.append(row(system, quantity, millions, "M", "measured", note))
    for quantity, name in (
        (TOTAL, "share of FSDP2's instructions"),
        (OUTSIDE, "share of FSDP2's instructions outside the process group"),
    ):
        share = round(sums["lowtide"][quantity] / sums["fsdp2"][quantity], 3)
        note = IN_GROUP if quantity == TOTAL and share > AIM else ""
        result.append(row("lowtide", name, share, "", "measured", note))
        result.append(row("aim", name, AIM, "", "arithmetic"))
    for phase in PHASES:
        value = round(costs["plain"][phase][0] / 1e6, 3)
        quantity = f"unsharded {phase} of a block, for scale"
        result.append(row("plain", quantity, value, "M", "measured"))
    return result


CASE = Case(
    name=NAME,
    describe="Instructions per 9-parameter unit, beside FSDP2.",
    how="""\
`programs/host_instructions.py` under valgrind's callgrind: the models of `host_cost`
with 8 blocks; after 5 steps of warm-up each of 3 forwards and backwards is a profile of
its own; median, less the unsharded model's, over 9 units. "Inside the process group" is
the inclusive cost of `c10d::FakeProcessGroup`.""",
    run=measure,
    only_by_name="only by name: callgrind takes minutes",
)
