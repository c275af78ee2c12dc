"""Two gloo ranks for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool
