"""torch's activation checkpointing around units and inside them changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.bits import same_bits
from support.model import Block, Llama, ModelConfig, batch, build, loss_fn
from support.systems import get_system
from support.training import Run, adamw, local_params, shard

CONFIG = ModelConfig(num_layers=3)


def around(model: Llama, use_reentrant: bool) -> None:
    """Every block's call goes through checkpoint."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        x = model.embed(ids)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        out: torch.Tensor = model.head(model.norm(x))
        return out

    model.forward = forward  # type: ignore[method-assign]


def inside(model: Llama, use_reentrant: bool) -> None:
    """Every block recomputes its feed-forward part, twice over the same weights."""

    def replace(block: Block) -> None:
        original = block.forward

        def ffn(y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = block.w2(F.silu(block.w1(y)) * block.w3(y))
            return out

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = original(x)
            x = x + checkpoint(ffn, x, use_reentrant=use_reentrant)
            return x + checkpoint(ffn, x, use_reentrant=use_reentrant)

        block.forward = forward  # type: ignore[method-assign]

    for layer in model.layers:
        assert isinstance(layer, Block)
        replace(layer)


PLACES = {"around": around, "inside": inside}


def train(
    name: str, run: Run, place: str | None, use_reentrant: bool, num_steps: int = 4
) -> dict[str, Any]:
    model = build(run.model)
    if place is not None:
        PLACES[place](model, use_reentrant)
    shard(model, run, get_system(name))
    optimizer = adamw(model, foreach=False)
    losses = []
    for step in range(num_steps):
        ids, targets = batch(run.model, step, 0, dist.get_rank())
        loss = loss_fn(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "params": local_params(model)}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_same_bits_as_fsdp2(
    num_ranks: int,
    place: str,
    use_reentrant: bool,
    reshard: bool,
    pool_of: Callable[[int], Any],
) -> None:
    run = Run(CONFIG, world_size=num_ranks, reshard_after_forward=reshard)
    pool = pool_of(num_ranks)
    ours = pool.run(train, "lowtide", run, place, use_reentrant)
    theirs = pool.run(train, "fsdp2", run, place, use_reentrant)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == other["losses"]
        for name, value in mine["params"].items():
            assert same_bits(value, other["params"][name]), name


def test_checkpointed_children_do_not_make_a_leaf(
    pool_of: Callable[[int], Any],
) -> None:
    """A unit with children is gathered in backward even when autograd saved nothing."""
    pool_of(1).run(_backward_through_a_recomputed_child)


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.linear, x, use_reentrant=False)
        return out


def _backward_through_a_recomputed_child() -> None:
    system = get_system("lowtide")
    model = nn.Sequential(_Recomputed(), _Recomputed())
    for child in model:
        system.fully_shard(child)
    system.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
