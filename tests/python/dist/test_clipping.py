"""Clipping by one norm beside parameters that are not sharded, whose gradients nobody
reduces: a rank alone may have some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import lowtide
from support.bits import assert_same_tensors
from support.training import local

MOST = 0.25
WHOSE = ("nobody's", "everybody's", "one rank's", "NaN on one rank")
EARLY = "in backward"


def built(meshes: int) -> Any:
    """The last layer's bias is not sharded; the first layer is over half of the ranks
    where there are two meshes."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 8))
    size = dist.get_world_size()
    both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("half", "rest"))
    lowtide.fully_shard(model[0], mesh=both["half"] if meshes == 2 else None)
    return lowtide.fully_shard(model, ignored_params={model[1].bias})


def backward(model: Any, whose: str) -> None:
    """The bias is used, or not, by every rank alike."""
    bias, first = model[1].bias, dist.get_rank() == 0
    bias.requires_grad_(True)
    x = torch.arange(10.0).view(2, 5)
    hidden = model(x)
    if whose == "nobody's" or (whose == "one rank's" and not first):
        hidden = hidden - bias + bias.detach()
        bias.register_post_accumulate_grad_hook(_forget)
    hidden.square().sum().backward()
    if whose == "NaN on one rank" and first:
        bias.grad[0] = float("nan")


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None


def clipped(how: str, meshes: int, whose: str) -> Any:
    """Gradients and the norm, or the error."""
    model = built(meshes)
    try:
        if how == EARLY:
            optimizer = lowtide.optimize_in_backward(
                model, torch.optim.SGD, lr=1.0, max_norm=MOST
            )
            before = [local(p).clone() for p in model.parameters()]
            backward(model, whose)
            optimizer.step()
            norm = optimizer.grad_norm
            pairs = zip(before, model.parameters(), strict=True)
            found = [b - local(p) for b, p in pairs]
        else:
            backward(model, whose)
            take = torch.nn.utils if how == "torch" else lowtide
            chosen = [p for p in model.parameters() if p.grad is not None]
            given = chosen if how == "torch" else model.parameters()
            norm = take.clip_grad_norm_(given, MOST)
            assert isinstance(norm, DTensor) == (meshes == 1)
            gradients = (p.grad for p in model.parameters())
            found = [local(g).clone() for g in gradients if g is not None]
    except ValueError as error:
        return str(error)
    names = map(str, range(len(found)))
    return dict(zip(names, found, strict=True)) | {"norm": local(norm).view(1)}


@pytest.mark.parametrize("how", ["lowtide", EARLY])
@pytest.mark.parametrize("meshes", [1, 2])
def test_a_gradient_that_is_not_sharded_is_all_ranks_or_refused_on_all(
    pool_of, how, meshes
):
    pool = pool_of(2 * meshes)
    who = "clip_grad_norm_" if how == "lowtide" else "optimize_in_backward: max_norm"
    for whose in ("one rank's", "NaN on one rank"):
        for text in pool.run(clipped, how, meshes, whose):
            assert text.startswith(
                f"lowtide: {who}: expected one norm of all gradients on the ranks of "
            ), text
    alone = whole_rule()
    for found in pool.run(clipped, how, meshes, "everybody's"):
        torch.testing.assert_close(found["norm"], alone)
        length = torch.cat([v.flatten() for k, v in found.items() if k != "norm"])
        assert length.norm() <= MOST * 1.0001


def whole_rule() -> torch.Tensor:
    """The norm in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 8))
    model(torch.arange(10.0).view(2, 5)).square().sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), MOST).view(1)


def test_one_that_nobody_has_changes_no_bit(pool_of):
    pool = pool_of(2)
    expected = pool.run(clipped, "torch", 1, "nobody's")
    for rank, found in enumerate(pool.run(clipped, "lowtide", 1, "nobody's")):
        assert_same_tensors(found, expected[rank], f"rank {rank}")
