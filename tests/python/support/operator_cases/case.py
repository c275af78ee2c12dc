"""A case of operator_dry_run: an operator or small function, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SQUARE = (1024, 1024)


@dataclass(frozen=True)
class Make:
    """Inputs of a case, on its device; contents do not matter."""

    device: torch.device

    def floats(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        tensor = torch.empty(*shape, dtype=dtype, device=self.device)
        return tensor.requires_grad_()

    def constant(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def longs(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self.device)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bool, device=self.device)

    def heads(
        self, length: int, dim: int, count: int = 8, dtype: torch.dtype = BF16
    ) -> torch.Tensor:
        """[2, count, length, dim] over [2, length, count, dim], as a projection
        leaves them."""
        x = torch.empty(2, length, count, dim, dtype=dtype, device=self.device)
        return x.transpose(1, 2).requires_grad_()


@dataclass(frozen=True)
class Case:
    inputs: Callable[[Make], Iterable[Any]]
    function: Callable[..., Any]


CASES: dict[str, Case] = {}


def case(
    name: str, inputs: Callable[[Make], Any], function: Callable[..., Any]
) -> None:
    assert name not in CASES, name
    CASES[name] = Case(inputs, function)


def pointwise(
    name: str, function: Callable[..., Any], dtype: torch.dtype = BF16
) -> None:
    case(name, lambda make: (make.floats(*SQUARE, dtype=dtype),), function)
