"""Freezing, adversaries, low-rank updates, averages of weights and scaled gradients:
the bits of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.layers import NUM_STEPS, Pattern, blocks, data, sgd, wrap
from support.recorder import Recorder, assert_pattern_equals_fsdp2, finish_step
from support.systems import System


def alternating_adversaries(system: System, record: Recorder) -> None:
    """Two models on one group; each step trains one with the other frozen."""
    models = [blocks(system), blocks(system, (2, 1, 0))]
    optimizers = [sgd(model) for model in models]
    for step in range(4):
        trained = step % 2
        for i, model in enumerate(models):
            model.requires_grad_(i == trained)
        y = models[1](models[0](data(step)))
        (y.sum() if trained else -y.sum()).backward()
        for i, model in enumerate(models):
            record.add_model(model)
            if i == trained:
                optimizers[i].step()
            model.zero_grad()


class LowRank(nn.Module):
    """A frozen layer and its trainable low-rank update, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.down = nn.Linear(5, 2, bias=False)
        self.up = nn.Linear(2, 5, bias=False)
        self.register_buffer("offset", torch.linspace(-1, 1, 5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.base(x) + self.up(self.down(x)) + self.offset


def low_rank_updates(system: System, record: Recorder) -> None:
    """Frozen bases; unfrozen half way, as after a warm-up."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(LowRank(), nn.Tanh(), LowRank())
    model = wrap(system, model, [model[0], model[2]])
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in model.parameters()], lr=0.1)
        model(data(step)).pow(2).sum().backward()
        finish_step(model, optimizer, record)
    for name, buffer in model.named_buffers():
        record.add(name, buffer)


def exponential_average(system: System, record: Recorder) -> None:
    """A second sharded model follows the first."""
    model, average = blocks(system), blocks(system)
    average.load_state_dict(model.state_dict())
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        model(data(step)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, other in zip(
                average.parameters(), model.parameters(), strict=True
            ):
                mine.lerp_(other, 0.25)
            record.add("teacher", average(data(step)))
        record.add_model(average)


def scaled_gradients(system: System, record: Recorder) -> None:
    """GradScaler; in step 1 an infinity makes every rank skip."""
    model = blocks(system)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(4):
        loss = model(data(step)).pow(2).sum()
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        record.add_model(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record.add("scale", torch.tensor(scaler.get_scale()))
    record.add_model(model)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        alternating_adversaries,
        low_rank_updates,
        exponential_average,
        scaled_gradients,
    )
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_equals_fsdp2(pool_of, pattern, num_ranks):
    assert_pattern_equals_fsdp2(pool_of(num_ranks), __name__, pattern)
