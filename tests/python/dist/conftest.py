"""Pools of gloo ranks that live as long as the test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from support.ranks import RankPool
from support.reference import train_by_rule
from support.training import Run, Trace

PoolOf = Callable[[int], RankPool]


@pytest.fixture(scope="session")
def pool_of() -> Iterator[PoolOf]:
    """The session's pool of a world size; made when first asked for."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def rule(pool_of: PoolOf) -> Callable[[Run], list[Trace]]:
    """Traces of the single-process rule, computed once per run."""

    @cache
    def traces(run: Run) -> list[Trace]:
        return pool_of(1).run(train_by_rule, run)[0]

    return traces


@pytest.fixture(params=(1, 2, 3, 4), ids=lambda n: f"{n}ranks")
def world_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=("fsdp2", "lowtide"))
def system(request: pytest.FixtureRequest) -> str:
    return request.param
