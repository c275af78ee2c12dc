from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from support.spmd import fake_mesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as mesh:
        yield mesh


@pytest.fixture
def model(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group("model")
