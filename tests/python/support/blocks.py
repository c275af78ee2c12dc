"""Residual blocks with named values, and how to train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide

DIM, HIDDEN, ROWS = 16, 24, 8
# Of one residual and one hidden value, fp32.
RESIDUAL_BYTES, HIDDEN_BYTES = 4 * ROWS * DIM, 4 * ROWS * HIDDEN


class Mlp(nn.Module):
    """Names what it receives "residual" and its first product "hidden"."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = lowtide.tag(x, "residual")
        h = lowtide.tag(self.up(self.norm(x)), "hidden")
        h = F.dropout(F.gelu(h), self.dropout, self.training)
        return x + self.down(h)


def stack(
    num_layers: int = 4, wrap: Callable[[nn.Module], nn.Module] | None = None, **kwargs
) -> nn.Sequential:
    """The same weights every time."""
    torch.manual_seed(1)
    blocks = [Mlp(**kwargs) for _ in range(num_layers)]
    if wrap is not None:
        for block in blocks:
            wrap(block)
    return nn.Sequential(*blocks)


def rows(seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, DIM, generator=generator)


def step(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """Loss, gradient of the input, gradients of the parameters; dropout seeded."""
    model.zero_grad()
    leaf = (rows() if x is None else x).requires_grad_()
    leaf.grad = None
    torch.manual_seed(3)
    loss = (model(leaf * 1.0) ** 2).sum()
    loss.backward()
    return [loss.detach(), *gradients([leaf, *model.parameters()])]


def gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = []
    for tensor in tensors:
        assert tensor.grad is not None
        found.append(tensor.grad.clone())
    return found


def assert_same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"value {i} differs by {(a - b).abs().max()}"
