"""``local_parameters``: the shards as plain tensors, for optimizers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lowtide._sharding.local_parameter import (
    LocalParameter,
    as_sharded,
    local_parameter_of,
)
from lowtide._sharding.subclass import is_extended
from lowtide._sharding.unit import units_of

__all__ = ["local_parameters", "sharded_optimizer"]


def local_parameters(model: nn.Module) -> list[nn.Parameter]:
    """This rank's rows of ``model.parameters()``, in that order, as plain parameters
    for an optimizer: a ``DTensor`` costs it several times the host time. Parameters
    that are not sharded are returned as they are.

    Gradient clipping and ``torch.amp.GradScaler`` see all ranks' rows, as with
    ``model.parameters()``. What else an optimizer computes from a whole parameter, as
    LAMB its trust ratio and Adafactor its rows and columns, it computes from this
    rank's rows: give it ``model.parameters()``. Save and load the optimizer's state
    inside :func:`sharded_optimizer`; outside, ``get_state_dict`` ends in a
    ``KeyError``. Call this after the model has its storage, dtype and weights' places
    for good: ``to_empty``, ``to`` and ``load_state_dict(assign=True)`` make other
    tensors.

    Raises ValueError for a model without a unit, and for a parameter that is a tensor
    subclass.
    """
    if not units_of(model.modules()):
        raise ValueError(
            "lowtide: local_parameters: expected a model sharded by lowtide, got "
            f"{type(model).__name__} without a unit. Call fully_shard or wrap first."
        )
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and is_extended(p._local_tensor):
            raise ValueError(
                f"lowtide: local_parameters: {name}: expected a plain tensor, got a "
                f"{type(p._local_tensor).__name__}, which has its own way to be "
                "updated. Give the optimizer model.parameters()."
            )
    return [local_parameter_of(p) for p in model.parameters()]


@contextlib.contextmanager
def sharded_optimizer(
    optimizer: torch.optim.Optimizer,
) -> Iterator[torch.optim.Optimizer]:
    """Inside, ``optimizer``, made of :func:`local_parameters`, speaks of the sharded
    parameters and its state is ``DTensor``: ``state_dict``, ``load_state_dict`` and
    ``torch.distributed.checkpoint.state_dict`` work as with an optimizer of
    ``model.parameters()``, and what they read and write crosses to one."""
    locals_ = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if isinstance(p, LocalParameter)
    ]
    _exchange(optimizer, {id(p): p._sharded for p in locals_}, as_sharded)
    try:
        yield optimizer
    finally:
        _exchange(optimizer, {id(p._sharded): p for p in locals_}, _as_local)


def _exchange(
    optimizer: torch.optim.Optimizer, other: dict[int, nn.Parameter], convert: Any
) -> None:
    for group in optimizer.param_groups:
        group["params"] = [other.get(id(p), p) for p in group["params"]]
    for p, values in list(optimizer.state.items()):
        if (replacement := other.get(id(p))) is not None:
            del optimizer.state[p]
            optimizer.state[replacement] = {
                name: convert(replacement, value) for name, value in values.items()
            }


def _as_local(parameter: LocalParameter, value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value
