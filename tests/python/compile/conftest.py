from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of another test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
