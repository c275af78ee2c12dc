"""A model of fused weight gradients and steps of training it, for their tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lowtide
from support.recorder import Recorder, finish_step

DIM, HIDDEN = 6, 256
STEPS = 2


class Block(nn.Module):
    """A weight that is one slice with two ranks, one whose rows lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)
        self.odd = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.odd(x)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 8)
        self.run_block: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x)


def model_of(grads: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Model()
    for block in model.blocks:
        lowtide.fully_shard(block, grads=grads, **settings)
    lowtide.fully_shard(model, grads=grads, **settings)
    return model


def data(seed: int, *, grad: bool = False, rows: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(2, rows, DIM, generator=generator, requires_grad=grad)


def uses(model: nn.Module) -> int:
    """Products that were added in place."""
    from lowtide._sharding.unit import unit_state

    states = {unit_state(module) for module in model.modules()} - {None}
    return sum(use.added for state in states for use in state.unit.fused_uses)


def steps(model: Any, record: Recorder, backward: Callable[[int], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        backward(step)
        finish_step(model, optimizer, record)


def plain(model: Any, record: Recorder) -> None:
    steps(model, record, lambda s: model(data(s)).pow(2).sum().backward())


def every_microbatch_reduces(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        for micro in range(3):
            model(data(3 * step + micro)).pow(2).sum().backward()

    steps(model, record, backward)


def only_the_last_reduces(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model(data(3 * step + micro)).pow(2).sum().backward()

    steps(model, record, backward)
