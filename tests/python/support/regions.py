"""Checkpointed regions made of functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide import checkpoint


class Call(nn.Module):
    """A module made of a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def region(function) -> Call:
    return checkpoint(Call(function))


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0, 3.0, 4.0), requires_grad=True)
