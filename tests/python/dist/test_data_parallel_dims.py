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

import lowtide
from lowtide import DataParallelMeshDims
from lowtide._sharding.unit import unit_state
from lowtide._torch_version import VERSION
from support.bits import same_bits
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import get_system

# Dimensions and their sizes; over which rows of the batch are split; dp_mesh_dims.
# (DTensor takes minutes to place an operator on four dimensions.)
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
    "replicas_and_tp": (
        {"replicate": 2, "dp": 1, "tp": 2},
        ("replicate", "dp"),
        {"shard": "dp", "replicate": "replicate"},
    ),
    "several_replicas": (
        {"far": 2, "near": 1, "dp": 2},
        ("far", "near", "dp"),
        {"shard": "dp", "replicate": ("far", "near")},
    ),
    "replicas_alone": (
        {"replicate": 2, "tp": 1},
        ("replicate",),
        {"replicate": "replicate"},
    ),
    "replicas_alone_and_tp": (
        {"replicate": 2, "tp": 2},
        ("replicate",),
        {"replicate": "replicate"},
    ),
    "several_replicas_alone": (
        {"far": 1, "near": 2},
        ("far", "near"),
        {"replicate": ("far", "near")},
    ),
    "four_replicas_alone": (
        {"far": 2, "near": 2},
        ("far", "near"),
        {"replicate": ("far", "near")},
    ),
}
SPLIT = [name for name, (*_, dims) in MESHES.items() if "shard" in dims]
# gloo adds four ranks' terms in an order that their place in a buffer decides.
WITH_BITS = [name for name in MESHES if name != "four_replicas_alone"]


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


def beside_tp(parameter: nn.Parameter) -> Shard:
    """The dimension that tensor parallelism has not split."""
    assert isinstance(parameter, DTensor)
    return Shard(int(Shard(0) in parameter.placements))


def train(
    system_name: str | None, name: str, reshard: bool = True, chosen: bool = False
) -> Record:
    model, (mesh, batch) = model_on(name)
    if system_name is not None:
        dims = DataParallelMeshDims(**MESHES[name][2])
        settings: dict[str, Any] = {"mesh": mesh, "dp_mesh_dims": dims}
        if chosen:
            settings["shard_placement_fn"] = beside_tp
        system = get_system(system_name)
        for module in (*model, model):
            system.fully_shard(module, reshard_after_forward=reshard, **settings)
        system.prepare(model)
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
@pytest.mark.parametrize("name", WITH_BITS)
def test_training_equals_fsdp2(pool_of, name, reshard):
    if name not in SPLIT and VERSION < (2, 14):
        pytest.skip("seen of FSDP2 from 2.14 on")
    pool = pool_of(num_ranks(name))
    assert_trains_as_fsdp2(pool, train, name, reshard)


@pytest.mark.skipif(VERSION < (2, 12), reason="FSDP2 has dp_mesh_dims from 2.12 on")
@pytest.mark.parametrize("name", ["shards_and_tp", "replicas_and_tp"])
def test_training_with_chosen_placements_equals_fsdp2(pool_of, name):
    pool = pool_of(num_ranks(name))
    assert_trains_as_fsdp2(pool, train, name, True, True)


def state_and_collectives(name: str) -> tuple[list[str], list[str]]:
    """Of a state dict, each entry and where it is; what a forward and a backward
    sent."""
    model, (mesh, batch) = model_on(name)
    dims = DataParallelMeshDims(**MESHES[name][2])
    for module in (*model, model):
        lowtide.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    model(batch(0)).pow(2).mean().backward()
    state = unit_state(model[0])
    assert state is not None and state.mesh is unit_state(model).mesh
    placed = [
        f"{key} {tuple(value.to_local().shape)} {value.device_mesh == mesh} "
        f"{value.placements}"
        for key, value in model.state_dict().items()
    ]
    replicas = state.groups.replicas
    assert replicas is not None
    sent = [
        f"{who} {kind}"
        for who, group in (("shards", state.groups.reduce), ("replicas", replicas))
        for kind, (_, size) in group.counters.items()
        if size > 0
    ]
    return placed, sent


def test_replicas_alone_are_whole_and_only_summed(pool_of):
    for placed, sent in pool_of(2).run(state_and_collectives, "replicas_alone"):
        assert placed[:3] == [
            "0.up (12, 8) True (Replicate(), Shard(dim=0))",
            "0.down (8, 12) True (Replicate(), Shard(dim=1))",
            "0.scale (8,) True (Replicate(), Replicate())",
        ]
        # What rank 0 tells of its times is no gradient.
        assert set(sent) - {"replicas broadcast"} == {"replicas all-reduce"}


@pytest.mark.parametrize("name", MESHES)
def test_gradients_are_those_of_the_unsharded_model_over_the_ranks(pool_of, name):
    """The loss is a mean over all rows: its gradients are summed by DTensor, and
    averaged by ``fully_shard``."""
    pool = pool_of(num_ranks(name))
    ranks = num_ranks(name) // MESHES[name][0].get("tp", 1)
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


def trained_by(way: str, folder: str) -> list[torch.Tensor]:
    """What two steps of replicas alone leave."""
    model, (mesh, batch) = model_on("replicas_alone_and_tp")
    dims = DataParallelMeshDims(replicate="replicate")
    for module in (*model, model):
        lowtide.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    sgd: Any = torch.optim.SGD
    if way == "in backward":
        optimizer = lowtide.optimize_in_backward(model, sgd, lr=0.1)
    elif way == "local parameters":
        optimizer = sgd(lowtide.local_parameters(model), lr=0.1)
    else:
        optimizer = sgd(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if way == "saved":
            lowtide.save(folder, model, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            lowtide.load(folder, model, optimizer)
        elif way == "slept":
            lowtide.sleep(model, optimizer)
            lowtide.wake(model, optimizer)
    return [parameter.full_tensor() for parameter in model.parameters()]


WAYS = ("in backward", "local parameters", "saved", "slept")


@pytest.mark.parametrize("way", WAYS)
def test_replicas_alone_are_stepped_and_saved_as_any(pool_of, tmp_path, way):
    pool, folder = pool_of(4), str(tmp_path / "saved")
    expected = pool.run(trained_by, "torch's", folder)
    for mine, other in zip(pool.run(trained_by, way, folder), expected, strict=True):
        assert all(map(same_bits, mine, other)), way


def refusals() -> list[str]:
    fully_shard = lowtide.fully_shard
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
            linear(whole),
            mesh=mesh,
            dp_mesh_dims=DataParallelMeshDims(replicate="dp"),
            shard_placement_fn=lambda parameter: Shard(1),
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
                "ValueError: lowtide: fully_shard: expected dp_mesh_dims with a dimens",
                "NotImplementedError: lowtide: fully_shard: expected reshard_after_for",
                "ValueError: lowtide: Linear.weight: expected a DTensor on the mesh of",
                "ValueError: lowtide: Linear.weight: expected Replicate() on the data-",
            ],
            strict=True,
        ):
            assert text.startswith(expected)
