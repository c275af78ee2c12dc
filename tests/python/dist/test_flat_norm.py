"""Clipping by one norm of a rank's shards: the path of CUDA, whose operators a CPU has
too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lowtide._sharding import flat_norm


def sharded_parameters(replicas: int) -> list[nn.Parameter]:
    """With gradients; uneven, and on the last ranks empty."""
    size = dist.get_world_size()
    placements: list[Shard | Replicate] = [Shard(0)]
    mesh = init_device_mesh("cpu", (size,))
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, size // replicas))
        placements = [Replicate(), Shard(0)]
    torch.manual_seed(0)
    parameters = []
    for sizes in ((7, 3), (1,), (2, 5), (64, 33)):
        parameter = nn.Parameter(
            distribute_tensor(torch.randn(sizes), mesh, placements)
        )
        parameter.grad = distribute_tensor(torch.randn(sizes), mesh, placements)
        parameters.append(parameter)
    return parameters


def clip_both_ways(replicas: int) -> dict[str, float]:
    flat, torchs = sharded_parameters(replicas), sharded_parameters(replicas)
    gradients = [p.grad for p in flat if p.grad is not None]
    assert flat_norm.fits(gradients)
    norm = flat_norm.total_norm(gradients)
    assert isinstance(norm, DTensor)
    flat_norm.scale_(gradients, 0.5, norm)
    expected = nn.utils.clip_grad_norm_(torchs, 0.5)
    assert isinstance(expected, DTensor)
    errors = [
        (a.grad.full_tensor() - b.grad.full_tensor()).abs().max().item()
        for a, b in zip(flat, torchs, strict=True)
    ]
    clipped = torch.cat([p.grad.full_tensor().flatten() for p in flat])
    return {
        "norm": norm.full_tensor().item(),
        "torch's": expected.full_tensor().item(),
        "error": max(errors),
        "norm after": clipped.norm().item(),
    }


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_sharded_gradients_are_clipped_as_torch_does(pool_of, world, replicas):
    for facts in pool_of(world).run(clip_both_ways, replicas):
        assert facts["norm"] == pytest.approx(facts["torch's"], rel=1e-6)
        assert facts["norm"] > 40  # of 2147 normal numbers
        assert facts["norm after"] == pytest.approx(0.5, rel=1e-5)
        assert facts["error"] < 1e-8


def placements_that_fit() -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.ones(4, 2)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = distribute_tensor(whole, mesh, [Shard(1)])
    copies = distribute_tensor(whole, mesh, [Replicate()])
    return {
        "none": flat_norm.fits([]),
        "whole": flat_norm.fits([whole, whole.bfloat16()]),
        "rows and columns": flat_norm.fits([rows, columns]),
        "copies": flat_norm.fits([copies]),
        "rows and copies": flat_norm.fits([rows, copies]),
        "rows and whole": flat_norm.fits([rows, whole]),
        "whole and rows": flat_norm.fits([whole, rows]),
        "double": flat_norm.fits([whole.double()]),
        "two devices": flat_norm.fits([whole, whole.to("meta")]),
    }


def test_what_is_not_placed_alike_goes_torchs_way(pool_of):
    for facts in pool_of(2).run(placements_that_fit):
        fitting = {name for name, fits in facts.items() if fits}
        assert fitting == {"whole", "rows and columns", "copies"}
