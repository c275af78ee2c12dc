"""Processes with a phantom device that live as long as a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.phantom import PhantomOf, Processes


@pytest.fixture(scope="module")
def phantom() -> Iterator[PhantomOf]:
    processes = Processes()
    yield processes
    processes.close()
