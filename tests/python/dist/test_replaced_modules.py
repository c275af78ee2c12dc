"""A module replaced between sharding and the first forward: FSDP2's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.bits import assert_same_tensors
from support.systems import get_system
from support.training import local


def gradients(system_name: str, shard_new: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    system = get_system(system_name)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    system.fully_shard(model)
    model[1] = nn.Linear(8, 2)
    if shard_new:
        system.fully_shard(model[1])
    system.prepare(model)
    (model(torch.arange(16.0).view(2, 8)) ** 2).sum().backward()
    return {n: local(p.grad).clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("shard_new", [True, False])
def test_a_new_head_trains(pool_of, shard_new):
    pool = pool_of(2)
    expected = pool.run(gradients, "fsdp2", shard_new)
    for rank, actual in enumerate(pool.run(gradients, "lowtide", shard_new)):
        assert len(actual) == 4
        assert_same_tensors(actual, expected[rank], f"rank {rank}")
