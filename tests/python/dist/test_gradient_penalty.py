"""Gradients of gradients: ``torch.autograd.grad(..., create_graph=True)`` with respect
to a sharded model's input, as gradient penalties need it. FSDP2 reads freed memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide

STEPS = 3


def critic() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 12), nn.Tanh()),
        nn.Sequential(nn.Linear(12, 12), nn.Softplus(), nn.LayerNorm(12)),
        nn.Linear(12, 1),
    )


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real, fake = torch.randn(2, 4, 6, generator=generator)
    return real, fake


def wasserstein(model: Any, seed: int) -> torch.Tensor:
    """WGAN-GP: three forwards, one of them differentiated twice."""
    real, fake = batch(seed)
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(
        model(between).sum(), between, create_graph=True, retain_graph=True
    )
    penalty = (slope.norm(2, dim=1) - 1).square().mean()
    return model(fake).mean() - model(real).mean() + 10 * penalty


def r1(model: Any, seed: int) -> torch.Tensor:
    """Regularisation of a discriminator at real data."""
    real, fake = batch(seed)
    real.requires_grad_()
    score = model(real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    loss = nn.functional.softplus(-score).mean() + 5 * slope.square().sum(1).mean()
    return loss + nn.functional.softplus(model(fake)).mean()


def of_the_weights(model: Any, seed: int) -> torch.Tensor:
    """The norm of the gradient of a weight, which its forward has handed out."""
    seen: list[torch.Tensor] = []
    handle = model[1][0].register_forward_hook(lambda m, a, o: seen.append(m.weight))
    loss = model(batch(seed)[0]).square().mean()
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, seen, create_graph=True)
    return loss + gradient.square().sum()


def curvature(model: Any, seed: int) -> torch.Tensor:
    """A third derivative."""
    x = batch(seed)[0].requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum()


Loss = Callable[[Any, int], torch.Tensor]
LOSSES: dict[str, Loss] = {
    one.__name__: one for one in (wasserstein, r1, of_the_weights, curvature)
}


def by_rule(loss_of: Loss) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model, size = critic(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        gradients = []
        for rank in range(size):
            optimizer.zero_grad()
            loss = loss_of(model, 10 * step + rank)
            loss.backward()
            gradients.append([p.grad for p in model.parameters()])
            if rank == dist.get_rank():
                losses.append(loss.detach())
        for p, of_ranks in zip(
            model.parameters(), zip(*gradients, strict=True), strict=True
        ):
            if of_ranks[0] is not None:
                p.grad = sum(of_ranks) / size
        optimizer.step()
    return losses, [p.detach() for p in model.parameters()]


def sharded(
    loss_of: Loss, sync_late: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = critic()
    for layer in model:
        lowtide.fully_shard(layer)
    lowtide.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        model.set_requires_gradient_sync(not sync_late)
        loss = loss_of(model, 10 * step + dist.get_rank())
        model.set_requires_gradient_sync(True)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert lowtide.memory_report(model).categories["gathered"].live == 0
    return losses, [p.full_tensor() for p in model.parameters()]


def error_in_func(derivative: str) -> str:
    model = critic()
    for layer in model:
        lowtide.fully_shard(layer)
    lowtide.fully_shard(model)
    x = torch.randn(2, 6)
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(lambda z: model(z).sum())(x),
        "jvp of grad": lambda: torch.func.jvp(
            torch.func.grad(lambda z: model(z).sum()), (x,), (x,)
        ),
        "vjp": lambda: torch.func.vjp(model, x)[1](torch.ones(2, 1)),
        "jacrev": lambda: torch.func.jacrev(model)(x),
        "inside vmap": lambda: torch.func.vmap(torch.func.jacrev(model))(x),
        "vmap": lambda: torch.func.vmap(model)(x),
    }
    try:
        calls[derivative]()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "derivative", ["grad", "vjp", "jacrev", "jvp of grad", "inside vmap"]
)
def test_derivatives_of_torch_func_are_refused_by_name(pool_of, derivative):
    """FSDP2 of 2.14 and 2.15 takes them. `torch.func.jvp` alone: `test_tangents.py`."""
    for text in pool_of(2).run(error_in_func, derivative):
        assert text == (
            "lowtide: unit 'Sequential': expected a forward outside of torch.func's "
            "derivatives, got one inside torch.func.grad, vjp, jacrev or the like. "
            "Use torch.autograd.grad, with create_graph=True for derivatives of "
            "derivatives, or torch.autograd.forward_ad."
        )


def test_vmap_runs(pool_of):
    assert pool_of(2).run(error_in_func, "vmap") == ["", ""]


def differences(name: str, sync_late: bool) -> list[float]:
    rule = by_rule(LOSSES[name])
    ours = sharded(LOSSES[name], sync_late)
    return [
        (a - b).abs().max().item()
        for mine, other in zip(ours, rule, strict=True)
        for a, b in zip(mine, other, strict=True)
    ]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_of_gradients_follow_the_rule(pool_of, num_ranks, name):
    for of_rank in pool_of(num_ranks).run(differences, name, False):
        assert max(of_rank) == 0


def test_the_first_gradient_may_be_taken_without_sync(pool_of):
    for of_rank in pool_of(2).run(differences, "wasserstein", True):
        assert max(of_rank) == 0
