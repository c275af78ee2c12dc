"""`dp_mesh_dims`: parameters that are DTensors on the mesh of all dimensions. FSDP2 has
it from torch 2.12 on, lowtide on any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)

from lowtide import DataParallelMeshDims
from lowtide._torch_version import VERSION
from support.bits import same_bits
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import get_system

# Dimensions and their sizes; over which rows of the batch are split; dp_mesh_dims.
MESHES: dict[str, tuple[dict[str, int], tuple[str, ...], dict[str, Any]]] = {
    "shards": ({"dp": 2, "tp": 1}, ("dp",), {"shard": "dp"}),
    "shards_and_tp": ({"dp": 2, "tp": 2}, ("dp",), {"shard": "dp"}),
    "replicas": (
        {"replicate": 2, "dp": 2, "tp": 1},
        ("replicate", "dp"),
        {"shard": "dp", "replicate": "replicate"},
    ),
    "flattened": (
        {"dp": 2, "cp": 2, "tp": 1},
        ("dp", "cp"),
        {"shard": ("dp", "cp")},
    ),
}


class MLP(nn.Module):
    def __init__(self, placed: Any) -> None:
        super().__init__()
        self.up = nn.Parameter(placed(torch.randn(12, 8), Shard(0)))
        self.down = nn.Parameter(placed(torch.randn(8, 12), Shard(1)))
        self.scale = nn.Parameter(placed(torch.ones(8), Replicate()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(torch.tanh(F.linear(x, self.up)), self.down)
        placements = x.placements  # type: ignore[attr-defined]
        return x + out.redistribute(placements=placements) * self.scale


def model_on(name: str) -> tuple[Any, Any]:
    sizes, rows, _ = MESHES[name]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def placed(value: torch.Tensor, tp: Any) -> torch.Tensor:
        placements = [tp if dim == "tp" else Replicate() for dim in sizes]
        return distribute_tensor(value, mesh, placements)

    torch.manual_seed(0)
    model = nn.Sequential(MLP(placed), MLP(placed))

    def batch(step: int) -> torch.Tensor:
        whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        placements = [Shard(0) if dim in rows else Replicate() for dim in sizes]
        return distribute_tensor(whole, mesh, placements)

    return model, (mesh, batch)


def train(system_name: str | None, name: str, reshard: bool = True) -> Record:
    model, (mesh, batch) = model_on(name)
    if system_name is not None:
        dims = DataParallelMeshDims(**MESHES[name][2])
        for module in (*model, model):
            get_system(system_name).fully_shard(
                module, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard
            )
    record = Recorder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    for step in range(3):
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        record.add("loss", loss.full_tensor())
        for key, parameter in model.named_parameters():
            # FSDP2 of 2.12 keeps the dimensions that it splits over.
            one_by_one = VERSION < (2, 13) and name == "flattened"
            where = None if one_by_one else parameter.placements
            record.add(f"{key} {where}", parameter)
            record.add(f"{key} whole", parameter.full_tensor())
            assert isinstance(parameter.grad, DTensor)
            record.add(f"{key}.grad", parameter.grad.full_tensor())
            if system_name is not None:
                assert parameter.grad.placements == parameter.placements
                assert parameter.grad.device_mesh == parameter.device_mesh
        optimizer.step()
        optimizer.zero_grad()
    return record.values


def num_ranks(name: str) -> int:
    product = 1
    for size in MESHES[name][0].values():
        product *= size
    return product


@pytest.mark.skipif(VERSION < (2, 12), reason="FSDP2 has dp_mesh_dims from 2.12 on")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", MESHES)
def test_training_equals_fsdp2(pool_of, name, reshard):
    pool = pool_of(num_ranks(name))
    assert_trains_as_fsdp2(pool, train, name, reshard)


@pytest.mark.parametrize("name", MESHES)
def test_gradients_are_those_of_the_unsharded_model_over_the_ranks(pool_of, name):
    """The loss is a mean over all rows: its gradients are summed by DTensor, and
    averaged by ``fully_shard``."""
    pool = pool_of(num_ranks(name))
    ranks = num_ranks(name) // MESHES[name][0]["tp"]
    for mine, plain in zip(
        pool.run(train, "lowtide", name), pool.run(train, None, name), strict=True
    ):
        wanted = {key: value for key, value in plain[: len(plain) // 3]}
        compared = 0
        for key, value in mine[: len(mine) // 3]:
            if key.endswith(".grad"):
                assert value is not None
                torch.testing.assert_close(value * ranks, wanted[key])
                assert num_ranks(name) > 2 or same_bits(value * ranks, wanted[key])
                compared += 1
        assert compared == 6


def refusals() -> list[str]:
    from lowtide import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 1))
    shards = DataParallelMeshDims(shard="dp")
    half = [Shard(0), Replicate()]

    def linear(placements: Any = None) -> nn.Module:
        module = nn.Linear(4, 4, bias=False)
        if placements is not None:
            weight = distribute_tensor(module.weight.detach(), mesh, placements)
            module.weight = nn.Parameter(weight)
        return module

    whole = [Replicate(), Replicate()]
    attempts = [
        lambda: fully_shard(linear(whole), mesh=unnamed, dp_mesh_dims=shards),
        lambda: fully_shard(
            linear(whole), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp")
        ),
        lambda: fully_shard(
            linear(whole), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp")
        ),
        lambda: fully_shard(
            linear(whole), mesh=mesh, dp_mesh_dims=shards, reshard_after_forward=2
        ),
        lambda: fully_shard(linear(), mesh=mesh, dp_mesh_dims=shards),
        lambda: fully_shard(linear(half), mesh=mesh, dp_mesh_dims=shards),
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises((ValueError, NotImplementedError)) as error:
            attempt()
        texts.append(f"{type(error.value).__name__}: {error.value}")
    return texts


def test_what_is_no_full_mesh_is_refused(pool_of):
    for texts in pool_of(2).run(refusals):
        for text, expected in zip(
            texts,
            [
                "ValueError: lowtide: fully_shard: expected a mesh whose dimensions",
                "ValueError: lowtide: fully_shard: expected dp_mesh_dims to name dim",
                "NotImplementedError: lowtide: fully_shard: expected dp_mesh_dims with",
                "NotImplementedError: lowtide: fully_shard: expected reshard_after_for",
                "ValueError: lowtide: Linear.weight: expected a DTensor on the mesh of",
                "ValueError: lowtide: Linear.weight: expected Replicate() on the data-",
            ],
            strict=True,
        ):
            assert text.startswith(expected)
