"""Forwards with tangents that are trained on, as mean flows are: inside
``torch.func.jvp`` FSDP2's bits, and, within ``torch.autograd.forward_ad`` too, where
FSDP2 raises, those of the model that is not sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

import lowtide
from lowtide._torch_version import VERSION
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import System, get_system

STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Velocity(nn.Module):
    """Of a flow, at points and times."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = x + self.time(time)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def build(system: System | None, low: bool, reshard: bool | None) -> Any:
    torch.manual_seed(0)
    model = Velocity()
    if system is None:
        return model
    dtypes = (torch.bfloat16, torch.float32) if low else (None, None)
    for module in (*model.blocks, model):
        policy = system.MixedPrecisionPolicy(
            *dtypes, output_dtype=torch.float32 if module is model else None
        )
        system.fully_shard(module, mp_policy=policy, reshard_after_forward=reshard)
    system.prepare(model)
    return model


def data(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, velocity = torch.randn(2, 4, 6, generator=generator)
    return x, velocity, torch.rand(4, 1, generator=generator)


def mean_flow(model: Any, step: int, rank: int) -> tuple[Tensor, ...]:
    """The derivative along the flow is a target."""
    x, velocity, time = data(step, rank)
    tangents = (velocity, torch.ones_like(time))
    out, slope = torch.func.jvp(model, (x, time), tangents)
    return out, slope, (out - velocity + time * slope.detach()).square().mean()


def of_the_slope(model: Any, step: int, rank: int) -> tuple[Tensor, ...]:
    """Gradients of the derivative, of nothing else."""
    x, velocity, time = data(step, rank)
    tangents = (velocity, torch.ones_like(time))
    out, slope = torch.func.jvp(model, (x, time), tangents)
    return out, slope, slope.square().mean()


def of_both_and_the_input(model: Any, step: int, rank: int) -> tuple[Tensor, ...]:
    x, velocity, time = data(step, rank)
    x.requires_grad_()
    tangents = (velocity.requires_grad_(), torch.ones_like(time))
    out, slope = torch.func.jvp(model, (x, time), tangents)
    loss = out.square().mean() + slope.square().mean()
    given = torch.autograd.grad(loss, (x, velocity), retain_graph=True)
    return out, slope, *given, loss


def along_nothing(model: Any, step: int, rank: int) -> tuple[Tensor, ...]:
    """The model's inputs have no tangents."""
    x, velocity, time = data(step, rank)
    primal = velocity.requires_grad_()
    out, slope = torch.func.jvp(lambda unused: model(x, time), (primal,), (x,))
    assert not slope.any()
    return out, slope, out.square().mean()


def dual_numbers(model: Any, step: int, rank: int) -> tuple[Tensor, ...]:
    x, velocity, time = data(step, rank)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, velocity)
        out, slope = forward_ad.unpack_dual(model(dual, time))
    return out, slope, slope.square().mean() + out.square().mean()


LOSSES = {
    one.__name__: one
    for one in (mean_flow, of_the_slope, of_both_and_the_input, along_nothing)
}


ALL = LOSSES | {"dual_numbers": dual_numbers}


def train(system_name: str, name: str, low: bool, reshard: bool | None) -> Record:
    model = build(get_system(system_name), low, reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        *values, loss = LOSSES[name](model, step, dist.get_rank())
        for place, value in enumerate((*values, loss)):
            record.add(f"{place}", value)
        loss.backward()
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()
    return record.values


@pytest.mark.skipif(VERSION < (2, 14), reason="seen of FSDP2 from 2.14 on")
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_training_equals_fsdp2(pool_of, name, low, reshard):
    assert_trains_as_fsdp2(pool_of(2), train, name, low, reshard)


def gradients_of(model: Any) -> list[Tensor]:
    """Whole ones. The last bias has none where a loss is of the derivative alone."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def by_rule(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Values on this rank, and all ranks' average gradients, without sharding."""
    averages: list[Tensor] = []
    for rank in range(dist.get_world_size()):
        model = build(None, False, None)
        *values, loss = ALL[name](model, 0, rank)
        loss.backward()
        if rank == dist.get_rank():
            mine = [value.detach() for value in (*values, loss)]
        gradients = [g / dist.get_world_size() for g in gradients_of(model)]
        averages = [
            a + b for a, b in zip(averages or [0] * 99, gradients, strict=False)
        ]
    return mine, averages


def differences(name: str, reshard: bool | None) -> float:
    expected, averages = by_rule(name)
    model = build(get_system("lowtide"), False, reshard)
    *values, loss = ALL[name](model, 0, dist.get_rank())
    loss.backward()
    found = gradients_of(model)
    pairs = [*zip((*values, loss), expected, strict=True)]
    pairs += zip(found, averages, strict=True)
    assert lowtide.memory_report(model).categories["gathered"].live == 0
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("name", ALL)
def test_training_follows_the_rule(pool_of, name, reshard):
    for difference in pool_of(2).run(differences, name, reshard):
        assert difference < 1e-6


def nested() -> float:
    """A second derivative, and many directions at once."""
    found: list[list[Tensor]] = []
    x, velocity, time = data(0, 0)

    def along(model: Any, at: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: model(z, time), (at,), (velocity,))[1]

    for model in (build(None, False, None), build(get_system("lowtide"), False, True)):
        second = torch.func.jvp(lambda at, m=model: along(m, at), (x,), (velocity,))[1]
        many = torch.func.vmap(
            lambda v, m=model: torch.func.jvp(lambda z: m(z, time), (x,), (v,))[1]
        )(torch.stack([velocity, x]))
        loss = second.square().mean() + many.square().mean()
        loss.backward()
        found.append([*gradients_of(model), loss.detach()])
    assert len(found[0]) > 5
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


def test_derivatives_of_derivatives_and_of_many_directions(pool_of):
    for wrong in pool_of(2).run(nested):
        assert wrong < 1e-6
