from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters


@pytest.fixture(scope="session", autouse=True)
def inductors_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this run alone: its keys know nothing of what operators declare, so code of an
    earlier lowtide would be taken for today's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of another test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
