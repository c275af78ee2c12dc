"""Everything a program computes, in order, to compare two systems."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.bits import difference, same_bits
from support.ranks import RankPool
from support.systems import get_system
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


def assert_trains_as_fsdp2(
    pool: RankPool, program: Callable[..., Record], *arguments: Any
) -> None:
    """``program(system, *arguments)`` records the same bits on every rank, values that
    are no None among them."""
    theirs = pool.run(program, "fsdp2", *arguments)
    ours = pool.run(program, "lowtide", *arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_records(mine, other)
        assert any(value is not None for _, value in other)


def record_pattern(module: str, pattern: str, system: str) -> Record:
    """``module``: a test's, whose PATTERNS are programs by name."""
    record = Recorder()
    importlib.import_module(module).PATTERNS[pattern](get_system(system), record)
    return record.values


def assert_pattern_equals_fsdp2(pool: RankPool, module: str, pattern: str) -> None:
    """On every rank the bits of everything that is recorded, values that are no None
    among it."""
    theirs = pool.run(record_pattern, module, pattern, "fsdp2", timeout=40)
    ours = pool.run(record_pattern, module, pattern, "lowtide", timeout=40)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_records(mine, other)
        assert any(value is not None for _, value in other)
