"""Every test file is collected, and each test is in `make test` or in one shard of
`make test-all`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import shards
from support import selection

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Listed:
    """A test: its shard, and whether a mark or the rule put it there."""

    shard: str
    why: str
    name: str

    @property
    def function(self) -> str:
        return self.name.split("[")[0]


@pytest.fixture(scope="module")
def listed() -> list[Listed]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--list-shards", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    lines = [line.split(" ", 3) for line in done.stdout.splitlines()]
    return [Listed(*line[1:]) for line in lines if line[0] == "shard"]


def test_every_test_file_is_collected(listed: list[Listed]) -> None:
    """A runner's default must not hide a folder."""
    collected = {test.name.split("::")[0] for test in listed}
    written = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert written - collected == set()


def test_every_slow_test_is_in_a_shard_that_is_run(listed: list[Listed]) -> None:
    known = {shard.name for shard in shards.SHARDS if "pytest" in shard.command}
    counts = Counter(test.shard for test in listed)
    assert set(counts) == {selection.QUICK, *known}
    assert counts[selection.QUICK] > 1000, counts


def test_the_rule_leaves_something_of_each_test_to_make_test(
    listed: list[Listed],
) -> None:
    """Only a mark takes a test away with all of its variants."""
    quick = {test.function for test in listed if test.shard == selection.QUICK}
    marked = {test.function for test in listed if test.why == "mark"}
    assert {test.function for test in listed} - quick <= marked


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([], []),
        ([{}], [0]),
        ([{"a": 1}, {"a": 2}], [0, 1]),
        ([{"a": a, "b": b} for a in "xyz" for b in "xy"], [0, 3, 4]),
        ([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}], [0, 2]),
    ],
)
def test_every_value_stays(rows: list[dict[str, object]], left: list[int]) -> None:
    assert selection.covering(rows) == left


def test_shards_take_turns() -> None:
    turns = [shards.in_turn(shards.SHARDS, turn) for turn in range(20)]
    all_of_them = {shard.name for shard in shards.SHARDS if shard.takes_turns}
    assert {shard.name for shard, *_ in turns} == all_of_them
    assert all({shard.name for shard in turn} == all_of_them for turn in turns)
    alone = {shard.name for shard in shards.SHARDS} - all_of_them
    assert alone == {"figures", "thread"}


def test_every_older_torch_has_its_turn() -> None:
    """The newest is what `make test` is run with."""
    cmake = (ROOT / "cmake" / "TorchFromPython.cmake").read_text()
    (minors,) = re.findall(r"LOWTIDE_TORCH_MINORS ([\d. ]+)\)", cmake)
    *older, newest = minors.split()
    assert [shard.command for shard in shards.OLDER] == [
        ("make", "test", f"TORCH={version}") for version in older
    ]
    assert f"\nTORCH ?= {newest}\n" in (ROOT / "Makefile").read_text()


def test_a_shard_starts_only_if_it_fits() -> None:
    """A second is left for the one of 30 minutes, and it is named."""
    quick = shards.Shard("quick", 0.0, (sys.executable, "-c", ""))
    bad = shards.Shard("bad", 0.0, (sys.executable, "-c", "raise SystemExit(3)"))
    long = shards.Shard("long", 30.0, (sys.executable, "-c", "raise SystemExit(4)"))
    became = shards.run_all([long, quick, bad], minutes=20)
    assert became["long"] == "not run: takes 30 minutes"
    assert became["quick"].startswith("passed")
    assert became["bad"].startswith("failed: exit status 3")


def test_a_shard_is_ended_with_the_time() -> None:
    endless = (sys.executable, "-c", "import time; time.sleep(1000)")
    became = shards.run_all([shards.Shard("endless", 0.0, endless)], minutes=0.01)
    assert became["endless"].startswith("cut off: no time left")
