"""``lowtide.Muon``: the bits that torch's gives whole matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowtide
from lowtide.muon import owners
from support.bits import assert_same_tensors
from support.layers import Blocks, data

# Wide, tall, of fewer rows than ranks, of rows that ranks do not divide. Rows are of 32
# elements: on CPUs torch rounds an add's last few otherwise than those before, which
# are others of a part than of the whole.
SHAPES = [(7, 64), (65, 32), (2, 32), (31, 32), (5, 96), (33, 32), (32, 32), (31, 64)]
SETTINGS: dict[str, dict[str, Any]] = {
    "by default": {},
    "of AdamW's size": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    "without nesterov": {"nesterov": False, "ns_steps": 3, "momentum": 0.4},
}


def matrices(seed: int, kind: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape[::-1] if kind == "columns" else shape for shape in SHAPES]
    if kind == "bf16":
        # Of tall ones torch's update is a transposed one, which CPUs add to a bf16
        # matrix element by element and round otherwise than vectors.
        shapes = [(rows, columns) for rows, columns in shapes if rows <= columns]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def steps(kind: str, setting: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of whole matrices by torch's, and of sharded ones."""
    size = dist.get_world_size()
    if kind == "replicas":
        mesh = init_device_mesh("cpu", (2, size // 2))
        placements: list[Any] = [Replicate(), Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (size,))
        placements = [Shard(1 if kind == "columns" else 0)]

    def place(i: int, tensor: torch.Tensor) -> torch.Tensor:
        if i % 2 == 1 and kind == "mixed":
            return tensor.clone()
        return distribute_tensor(tensor.clone(), mesh, placements)

    values = matrices(0, kind)
    if kind == "bf16":
        values = [each.bfloat16() for each in values]
    whole = [nn.Parameter(each.clone()) for each in values]
    parts = [nn.Parameter(place(i, each)) for i, each in enumerate(values)]
    narrow = torch.bfloat16 if kind.startswith("bf16") else torch.float32
    for p in (*whole, *parts):
        p.grad_dtype = narrow
    theirs = torch.optim.Muon(halves(whole), **SETTINGS[setting])
    ours = lowtide.Muon(halves(parts), **SETTINGS[setting])
    for step in range(1, 4):
        for i, gradient in enumerate(matrices(step, kind)):
            gone = i == 3 and step == 2
            gradient = gradient.to(narrow)
            whole[i].grad = None if gone else gradient.clone()
            parts[i].grad = None if gone else place(i, gradient)
        theirs.step()
        ours.step()
    return everything(whole, theirs), everything(parts, ours)


def halves(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:3], "lr": 0.02},
        {"params": parameters[3:], "lr": torch.tensor(0.01)},
    ]


def everything(parameters: list[nn.Parameter], optimizer: Any) -> dict[str, Any]:
    found = {}
    for i, p in enumerate(parameters):
        found[f"{i}"] = full(p)
        for name, value in optimizer.state[p].items():
            found[f"{i}.{name}"] = full(value)
    return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize(
    ("kind", "ranks", "setting"),
    [
        ("rows", 2, "by default"),
        ("rows", 3, "by default"),
        ("rows", 3, "of AdamW's size"),
        ("rows", 2, "without nesterov"),
        ("columns", 3, "by default"),
        ("mixed", 2, "by default"),
        ("replicas", 4, "by default"),
        ("rows", 1, "by default"),
        ("bf16 gradients", 2, "by default"),
        ("bf16", 3, "by default"),
    ],
)
def test_sharded_matrices_have_the_bits_of_whole_ones(pool_of, kind, ranks, setting):
    for theirs, ours in pool_of(ranks).run(steps, kind, setting):
        assert_same_tensors(ours, theirs, "")


def test_work_is_shared_by_its_size():
    assert owners([3, 9, 3, 3, 1], 2) == [1, 0, 1, 1, 0]
    assert owners([], 3) == []
    loads = [0] * 4
    costs = [5, 5, 5, 5, 4, 4, 4, 4]
    for i, rank in enumerate(owners(costs, 4)):
        loads[rank] += costs[i]
    assert loads == [9] * 4


# -- in a model -----------------------------------------------------------------------


def trained(how: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Blocks()
    for layer in model.layers:
        lowtide.fully_shard(layer)
    lowtide.fully_shard(model)
    parameters = (
        lowtide.local_parameters(model) if how == "local" else list(model.parameters())
    )
    weights = [p for p in parameters if p.ndim == 2]
    biases = [p for p in parameters if p.ndim == 1]
    muon = lowtide.Muon(weights, lr=0.02)
    adam = torch.optim.AdamW(biases, lr=0.01)
    if how == "in backward":
        lowtide.optimize_in_backward(model, muon)
        lowtide.optimize_in_backward(model, adam)
    if how == "whole":
        # FSDP2's way: torch's own on DTensors of whole matrices, replicated.
        muon = torch.optim.Muon(weights, lr=0.02)
    for step in range(3):
        model(data(step)).pow(2).sum().backward()
        if how == "whole":
            step_whole(muon, weights)
        else:
            muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
    found = {name: full(p) for name, p in model.named_parameters()}
    if how not in ("local", "whole"):
        state = dcp.get_optimizer_state_dict(
            model, muon, options=dcp.StateDictOptions(full_state_dict=True)
        )
        assert all(
            value["momentum_buffer"].shape == (5, 5)
            for value in state["state"].values()
        )
    return found


def step_whole(muon: Any, weights: list[Any]) -> None:
    """torch's Muon, of whole matrices on each rank, whose rows are written back."""
    whole = getattr(muon, "whole", None)
    if whole is None:
        wholes = [nn.Parameter(full(p)) for p in weights]
        whole = muon.whole = torch.optim.Muon(wholes, lr=0.02)
    for mine, p in zip(whole.param_groups[0]["params"], weights, strict=True):
        mine.grad = full(p.grad)
    whole.step()
    for mine, p in zip(whole.param_groups[0]["params"], weights, strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(mine.detach(), p.device_mesh, p.placements))


@pytest.mark.parametrize("how", ["behind", "in backward", "local"])
def test_models_train_to_the_bits_of_whole_matrices(pool_of, how):
    pool = pool_of(2)
    theirs = pool.run(trained, "whole")
    for mine, other in zip(pool.run(trained, how), theirs, strict=True):
        assert_same_tensors(mine, other, "")


def crossing() -> None:
    """States of torch's Muon, of whole matrices, go to shards and back."""
    torch.manual_seed(0)
    model = Blocks()
    weights = [p for p in model.parameters() if p.ndim == 2]
    theirs = torch.optim.Muon(weights)
    for p in weights:
        p.grad = torch.randn_like(p)
    theirs.step()
    options = dcp.StateDictOptions(full_state_dict=True)
    saved = dcp.get_optimizer_state_dict(model, theirs, options=options)
    sharded = Blocks()
    lowtide.fully_shard(sharded)
    ours = lowtide.Muon([p for p in sharded.parameters() if p.ndim == 2])
    dcp.set_optimizer_state_dict(sharded, ours, saved, options=options)
    again = dcp.get_optimizer_state_dict(sharded, ours, options=options)
    flat = [
        {name: s["momentum_buffer"] for name, s in state["state"].items()}
        for state in (again, saved)
    ]
    assert_same_tensors(*flat, "")


def test_states_cross_with_those_of_whole_matrices(pool_of):
    pool_of(2).run(crossing)


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    twice = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    with pytest.raises(NotImplementedError, match="expected one dimension"):
        lowtide.Muon([nn.Parameter(twice)])
    with pytest.raises(ValueError, match="only supports 2D"):
        lowtide.Muon([nn.Parameter(torch.ones(4))])


def test_what_it_can_not_serve_raises_by_name(pool_of):
    pool_of(4).run(refusals)
