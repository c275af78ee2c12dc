"""Gradients of local parameters: clipping and GradScaler see every rank's rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from support.bits import assert_same_tensors
from support.training import local

CLIPS: dict[str, Callable[..., Tensor]] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "lowtide": lowtide.clip_grad_norm_,
}


def built(mixed: bool) -> Any:
    """7 rows: ranks differ in size, and none is empty (foreach takes no norm of that).
    `mixed`: with a parameter that is not sharded."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 8))
    ignored = {model[1].bias} if mixed else None
    return lowtide.fully_shard(model, ignored_params=ignored)


def gradients(model: nn.Module) -> None:
    (model(torch.arange(10.0).view(2, 5)) ** 2).sum().backward()


def clipped(which: str, of_locals: bool, **settings: Any) -> dict[str, Tensor]:
    model = built(mixed=False)
    gradients(model)
    parameters = (
        lowtide.local_parameters(model) if of_locals else list(model.parameters())
    )
    norm: Any = CLIPS[which](parameters, 0.25, **settings)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    result = {n: local(p.grad).clone() for n, p in model.named_parameters()}
    return result | {"norm": norm.view(1)}


SETTINGS: list[dict[str, Any]] = [
    {"norm_type": norm_type, "foreach": foreach}
    for norm_type, foreach in itertools.product((2.0, 1.0, float("inf")), (None, True))
]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("which", CLIPS)
def test_the_norm_is_over_all_ranks(pool_of, num_ranks, which):
    pool = pool_of(num_ranks)
    for settings in SETTINGS:
        actual = pool.run(clipped, which, True, **settings)
        expected = pool.run(clipped, which, False, **settings)
        for rank in range(num_ranks):
            what = f"{settings} on rank {rank}"
            assert_same_tensors(actual[rank], expected[rank], what)


def after_overflow(place: str, mixed: bool, **settings: Any) -> tuple[bool, float]:
    """Whether the step changed this rank's rows, and the scale after it."""
    rank = torch.distributed.get_rank()
    model = built(mixed)
    optimizer = torch.optim.AdamW(lowtide.local_parameters(model), lr=1.0, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    if place == "rank 0's rows" and rank == 0:
        local(model[0].weight.grad)[0, 0] = float("inf")
    if place == "a whole gradient":
        model[1].bias.grad[0] = float("inf")
    before = [local(p).clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    same = map(torch.equal, before, map(local, model.parameters()))
    return not all(same), scaler.get_scale()


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": False}])
def test_one_ranks_overflow_is_every_ranks(pool_of, settings):
    pool = pool_of(2)
    for place, mixed in (
        ("rank 0's rows", False),
        ("rank 0's rows", True),
        ("a whole gradient", True),
    ):
        skipped = pool.run(after_overflow, place, mixed, **settings)
        assert skipped == [(False, 8.0)] * 2, (place, mixed)
    assert pool.run(after_overflow, "none", True, **settings) == [(True, 16.0)] * 2


def unscaled(of_locals: bool) -> dict[str, Tensor]:
    model = built(mixed=True)
    parameters = lowtide.local_parameters(model) if of_locals else model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    if of_locals:
        scaler.unscale_(optimizer)
    else:
        for p in model.parameters():
            local(p.grad).mul_(1 / 16)
    return {n: local(p.grad).clone() for n, p in model.named_parameters()}


def test_unscaling_changes_the_sharded_gradients(pool_of):
    pool = pool_of(2)
    expected = pool.run(unscaled, False)
    for rank, actual in enumerate(pool.run(unscaled, True)):
        assert_same_tensors(actual, expected[rank], f"rank {rank}")
