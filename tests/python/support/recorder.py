"""Everything a program computes, in order, to compare two systems."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from support.bits import difference, same_bits
from support.training import local

Record = list[tuple[str, torch.Tensor | None]]


class Recorder:
    def __init__(self) -> None:
        self.values: Record = []

    def add(self, name: str, tensor: torch.Tensor | None) -> None:
        value = None if tensor is None else local(tensor).clone()
        self.values.append((name, value))

    def add_model(self, model: nn.Module) -> None:
        """Every parameter and its gradient."""
        for name, p in model.named_parameters():
            self.add(name, p)
            self.add(f"{name}.grad", p.grad)


def finish_step(model: Any, optimizer: Any, record: Recorder) -> None:
    record.add_model(model)
    optimizer.step()
    optimizer.zero_grad()


def assert_same_records(actual: Record, expected: Record) -> None:
    assert [name for name, _ in actual] == [name for name, _ in expected]
    wrong = [
        f"{i}: {name}: {difference(value, other)}"
        for i, ((name, value), (_, other)) in enumerate(
            zip(actual, expected, strict=True)
        )
        if not same_bits(value, other)
    ]
    assert not wrong, (wrong[:5], len(wrong))
