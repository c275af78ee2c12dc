"""Bytes that something wrote which is no operator of torch's, or whose schema keeps it
quiet, are never taken for what an operator returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import ActivationPolicy, checkpoint, tag

WIDTH = 8


def in_function(write: Callable[[Tensor], Tensor]) -> Any:
    """As a kernel's wrapper does: the bytes come through a pointer."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return write(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    return Kernel.apply


def into_empty(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.numpy()[...] = 2 * x.detach().numpy()
    return y


def added_to_zeros(x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape)
    y.numpy()[...] += 2 * x.detach().numpy()
    return y


def over_a_copy(x: Tensor) -> Tensor:
    y = x.clone()
    y.numpy()[...] *= 2
    return y


class Block(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        h = tag(self.a(x), "a")
        return self.b(torch.sin(tag(self.kernel(h.sin()), "kernel")))


def gradients(model: nn.Module) -> list[Tensor]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    (model(x.requires_grad_() * 1.5) ** 2).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (into_empty, "aten.empty_like.default allocated it"),
        (added_to_zeros, "aten.new_zeros.default allocated it"),
        (over_a_copy, "aten.clone.default copied it in an autograd.Function"),
    ],
)
def test_what_a_kernel_wrote_is_refused(write: Any, reason: str) -> None:
    kernel = in_function(write)
    ours = checkpoint(Block(kernel), ActivationPolicy(save=["a", "kernel"]))
    with pytest.raises(ValueError, match=f"got 0 bytes: 1 x {reason}"):
        gradients(ours)
    expected = gradients(Block(kernel))
    ours.zero_grad()
    for theirs, mine in zip(expected, gradients(ours), strict=True):
        assert torch.equal(theirs, mine)


def test_a_copy_outside_of_functions_is_stored() -> None:
    ours = checkpoint(Block(torch.clone), ActivationPolicy(save=["kernel"]))
    for theirs, mine in zip(
        gradients(Block(torch.clone)), gradients(ours), strict=True
    ):
        assert torch.equal(theirs, mine)
