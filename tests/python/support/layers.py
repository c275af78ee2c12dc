"""Three layers in a row, sharded one unit each, and a loop that trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.recorder import Recorder, finish_step
from support.systems import System

NUM_STEPS = 3
Pattern = Callable[[System, Recorder], None]


class Blocks(nn.Module):
    """Three layers in a row; `calls` says in which order they run."""

    def __init__(self, calls: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.calls = calls
        self.wrap_call: Callable[..., Any] = lambda layer, x: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.calls:
            x = torch.tanh(self.wrap_call(self.layers[i], x))
        return x


def wrap(system: System, model: Any, units: Any) -> Any:
    for unit in units:
        system.fully_shard(unit)
    system.fully_shard(model)
    system.prepare(model)
    return model


def blocks(system: System, calls: tuple[int, ...] = (0, 1, 2)) -> Any:
    torch.manual_seed(0)
    model = Blocks(calls)
    return wrap(system, model, model.layers)


def data(step: int, *, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, 5, generator=generator, requires_grad=grad)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def train(model: Any, record: Recorder, loss: Callable[[int], torch.Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        value = loss(step)
        record.add("loss", value)
        value.backward()
        finish_step(model, optimizer, record)
