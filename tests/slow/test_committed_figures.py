"""Stored figures that were simulated are those of today's code. Each run computes one
part of every case again, each day the next one; LOWTIDE_TURN=N takes the N-th, such as
a number that CI counts up."""

from __future__ import annotations

import os
from datetime import date

import pytest
import results
import run as runner
from case import Case
from foreign import Absent

from lowtide._torch_version import VERSION

TURN = int(os.environ.get("LOWTIDE_TURN", date.today().toordinal()))
MINOR = ".".join(map(str, VERSION))
CASES = [case for case in map(runner.load, runner.CASES) if case.parts]


@pytest.mark.slow("figures")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_part_gives_the_stored_figures(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    name = case.part_in_turn(TURN)
    with capsys.disabled():
        print(f"\n{case.name}, turn {TURN} of {len(case.parts)} parts: {name}")
    stored = results.read(runner.RESULTS / f"{case.name}.json")
    obtained = str(stored.environment["torch"])
    of_this = obtained.partition("+")[0].rpartition(".")[0] == MINOR
    if not of_this and name != f"torch {MINOR}":  # a part of several torches' figures
        pytest.skip(f"obtained with torch {obtained}")
    try:
        rows = list(case.parts[name]())
    except Absent as why:
        pytest.skip(str(why))
    assert results.differences(stored, rows) == []
