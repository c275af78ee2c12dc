"""Exceptions on demand at a chosen place of forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Boom(RuntimeError):
    """Raised by a bomb; no library raises it."""


class Bombs:
    """One place per module without children: before its forward, and at the
    gradient of its output.  Install before wrapping, so that the places lie
    inside the unit; the graph is the same whether armed or not."""

    def __init__(self, model: nn.Module) -> None:
        self._armed: tuple[str, str] | None = None
        self.places = [
            name for name, m in model.named_modules() if not any(m.children())
        ]
        for name in self.places:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._forward_hook(name))
            module.register_forward_hook(self._output_hook(name))

    def arm(self, place: str, when: str) -> None:
        """`when` is "forward" or "backward"; goes off once."""
        assert place in self.places and when in ("forward", "backward")
        self._armed = (place, when)

    def reached(self, place: str, when: str) -> None:
        if self._armed == (place, when):
            self._armed = None
            raise Boom(f"{when} of {place}")

    def _forward_hook(self, place: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.reached(place, "forward")

        return hook

    def _output_hook(self, place: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return _Fuse.apply(output, self, place)

        return hook


class Explosion(torch.autograd.Function):
    """The identity; raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Boom("backward")


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bombs: Bombs, place: str) -> torch.Tensor:
        ctx.bombs, ctx.place = bombs, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.bombs.reached(ctx.place, "backward")
        return grad, None, None
