"""Which tests `make test` runs, and in which shard of `make test-all` the others are.

A test is slow, and so not in `make test`, by its mark or by the rule for tests that are
crossed with parameters:

- `@pytest.mark.slow` on a test, a module or a `pytest.param`;
- of the world sizes of a test, those but 2 ranks, and 3 where the `world_size` fixture
  asks for uneven shards; of a test without 2 ranks the smallest stays;
- FSDP2 as the system under test where lowtide is the other: what torch does is news
  only with a new torch (stored digests of it would hold for one kind of processor,
  by which BLAS rounds);
- the backend inductor where another is tried, too: its C++ compilers take minutes;
- of what is left, every value of every parameter stays at least once, not every
  combination (`covering`).

`pytest --runslow` runs all, `pytest --slow-shard NAME` the slow ones of a shard alone.
A test that the command line names by `file::test` is run either way.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

# The slow tests of tests/python/dist, by file, in so many shards of about equal time.
DIST_SHARDS = 3
QUICK = "-"  # how --list-shards names `make test`
RANKS = ("world_size", "num_ranks", "ranks", "world", "size")
FEW_RANKS = 2
UNEVEN_RANKS = 3


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption("--runslow", action="store_true", help="also the slow tests")
    group.addoption("--slow-shard", metavar="NAME", help="only slow tests, of a shard")
    group.addoption(
        "--list-shards", action="store_true", help="print each test's shard and stop"
    )


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    shards = shards_of(items)
    if config.getoption("--list-shards"):
        for item in items:
            why = "mark" if item.get_closest_marker("slow") else "rule"
            print(f"shard {shards[item] or QUICK} {why} {item.nodeid}")
        items.clear()
        return
    if config.getoption("--runslow") or any("::" in arg for arg in config.args):
        return
    wanted = config.getoption("--slow-shard")
    kept = [item for item in items if shards[item] == wanted]
    config.hook.pytest_deselected(
        items=[item for item in items if shards[item] != wanted]
    )
    items[:] = kept


def shards_of(items: Sequence[pytest.Item]) -> dict[pytest.Item, str | None]:
    """None: the test is in `make test`."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    quick = {
        item
        for variants in functions.values()
        for item in thinned([v for v in variants if not v.get_closest_marker("slow")])
    }
    return {item: None if item in quick else shard_of(item) for item in items}


def shard_of(item: pytest.Item) -> str:
    """By the mark's argument, else by folder and file."""
    mark = item.get_closest_marker("slow")
    if mark is not None and mark.args:
        return str(mark.args[0])
    folder = item.path.parent.name
    if folder != "dist":
        return folder if folder in ("phantom", "faults") else "rest"
    return f"dist-{1 + zlib.crc32(item.path.name.encode()) % DIST_SHARDS}"


def thinned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Variants of one function."""
    parameters = {item: _parameters(item) for item in items}
    values = {
        name: {of[name] for of in parameters.values() if name in of}
        for name in {name for of in parameters.values() for name in of}
    }

    def kept(of: Mapping[str, Any]) -> bool:
        if of.get("system") == "fsdp2" and "lowtide" in values["system"]:
            return False
        if of.get("backend") == "inductor" and len(values["backend"]) > 1:
            return False
        return all(
            of[name] in _sizes(name, values[name]) for name in RANKS if name in of
        )

    left = [item for item in items if kept(parameters[item])]
    chosen = covering([parameters[item] for item in left])
    return [left[i] for i in chosen]


def _sizes(name: str, sizes: set[Any]) -> set[Any]:
    if not all(isinstance(size, int) for size in sizes):
        return sizes
    if FEW_RANKS not in sizes:
        return {min(sizes)}
    return sizes & ({FEW_RANKS, UNEVEN_RANKS} if name == "world_size" else {FEW_RANKS})


def covering(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of few rows that have every value that `rows` have of a name."""
    values = [set(row.items()) for row in rows]
    missing = set().union(*values)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda i: (len(values[i] & missing), -i))
        chosen.append(best)
        missing -= values[best]
    return sorted(chosen) or list(range(len(rows)))


def _parameters(item: pytest.Item) -> dict[str, Any]:
    """Values that can be compared, by name."""
    call = getattr(item, "callspec", None)
    if call is None:
        return {}
    return {
        name: value if isinstance(value, (int, str)) else repr(value)
        for name, value in call.params.items()
    }
