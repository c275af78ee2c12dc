"""Errors name parameters by their path from the root, wherever their name is kept: what
sharded a module saw it alone, and the root renames it in the first forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from lowtide import fully_shard

NAME = "layers.1.0.weight"


class Net(nn.Module):
    """Units two levels below the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.layers[1][0].register_parameter(
            "codes",
            nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def keep(model: Any, what: Callable[[Any], Any]) -> Any:
    """What the second unit's forward made of its weight."""
    kept: list[Any] = []
    unit = model.layers[1][0]
    hook = unit.register_forward_pre_hook(lambda *_: kept.append(what(unit.weight)))
    try:
        model(torch.ones(2, 4)).sum().backward()
    finally:
        hook.remove()
    return kept[0]


def kept_weight(model: Any) -> None:
    keep(model, lambda weight: weight.detach()).sum()


def kept_array(model: Any) -> None:
    keep(model, lambda weight: weight.detach().numpy())


def unfrozen(model: Any) -> None:
    model.layers[1][0].codes.requires_grad_()
    model(torch.ones(2, 4))


def replaced(model: Any) -> None:
    model.layers[1][0].weight = nn.Parameter(torch.ones(4, 4))
    model(torch.ones(2, 4))


def split_backward(model: Any) -> None:
    """As a stage of a zero-bubble schedule whose parameters were resharded."""
    model.layers[0][0].requires_grad_(False)
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    x = torch.ones(2, 4, requires_grad=True)
    y = model(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], parameters)
    stage_backward_weight(parameters, groups)

    class Stage(_PipelineStageBase):
        submod = model
        _has_backward = True  # torch 2.15 asks for these two
        _gradient_reduction_handle = None

    Stage.__abstractmethods__ = frozenset()
    object.__new__(Stage).perform_reduce_grad(1)


# What does it, and how the error begins.
ERRORS: dict[Callable[[Any], None], str] = {
    kept_weight: f"{NAME}: expected a read while its unit 'layers.1.0' is gathered, ",
    kept_array: f"{NAME}: expected no NumPy array of it when its unit 'layers.1.0' ",
    unfrozen: "unit 'layers.1.0': expected layers.1.0.codes, which has begun to ",
    replaced: f"{NAME}: expected the parameter that fully_shard left there, ",
    split_backward: f"parameter '{NAME}': expected its gradient from the backward ",
}


def error_of(name: str) -> str:
    torch.manual_seed(0)
    model: Any = Net()
    for layer in model.layers:
        fully_shard(layer[0])
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    cause = {one.__name__: one for one in ERRORS}[name]
    with pytest.raises((RuntimeError, ValueError)) as error:
        cause(model)
    return str(error.value)


@pytest.mark.parametrize("cause", ERRORS, ids=lambda cause: cause.__name__)
def test_a_parameter_is_named_by_its_path(pool_of, cause):
    for text in pool_of(2).run(error_of, cause.__name__):
        assert text.startswith(f"lowtide: {ERRORS[cause]}"), text
