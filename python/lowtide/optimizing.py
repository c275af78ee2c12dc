"""How optimizers take sharded parameters: as plain rows, with states on the host."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lowtide._sharding.host_states import HostStates, host_states_of
from lowtide._sharding.local_parameter import (
    LocalParameter,
    as_sharded,
    local_parameter_of,
    rows_of,
    sharded_of,
)
from lowtide._sharding.optimizers import count_steps, devices_of
from lowtide._sharding.step_on_rows import is_elementwise
from lowtide._sharding.subclass import is_extended
from lowtide._sharding.unit import units_of

__all__ = ["local_parameters", "offload_states", "sharded_optimizer"]


def local_parameters(model: nn.Module) -> list[nn.Parameter]:
    """This rank's rows of ``model.parameters()``, in that order, as plain parameters
    for an optimizer: a ``DTensor`` costs it several times the host time. Those of
    ``torch.optim`` that are elementwise take rows by themselves. Parameters
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


def offload_states(optimizer: torch.optim.Optimizer) -> None:
    """From now on the states of ``optimizer`` that are as long as a parameter are in
    page-locked host memory but for the step of their unit: copied to the device ahead
    of it and back behind it, those of two units at a time. Bits are the same.
    With :func:`optimize_in_backward` the copies run beside the backward. Otherwise a
    step takes as long as the link takes for all states, in and out at once.

    ``step()`` returns when the states are on the host. In state dicts, and for whoever
    reads them, they are ``DTensor``s of host memory, as with ``CPUOffloadPolicy``.
    ``load_state_dict`` has all of them on the device for a moment, as torch puts them
    there.

    Raises:
        ValueError: For an optimizer that is not one of ``torch.optim``'s elementwise
            ones, or has no sharded parameters, or some on another device than their
            model, as ``CPUOffloadPolicy`` has them: their states are there, too.
        RuntimeError: In ``step()``, where the host has no memory, and for parameters or
            gradients whose rows are not plain tensors.
    """
    who, name = "lowtide: offload_states", type(optimizer).__name__
    if not is_elementwise(optimizer):
        raise ValueError(
            f"{who}: expected an elementwise optimizer of torch.optim, got {name}. "
            "Leave it out, or give the model "
            "offload_policy=CPUOffloadPolicy()."
        )
    if host_states_of(optimizer) is not None:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    devices = devices_of(parameters)
    if not devices:
        raise ValueError(
            f"{who}: expected an optimizer of a model's sharded parameters, got {name} "
            "with none of them. Make it behind fully_shard, of model.parameters()."
        )
    there = {rows_of(sharded_of(p)).device for p in parameters}
    if len(devices | there) != 1:
        raise ValueError(
            f"{who}: expected all parameters on the device of their model, got them on "
            f"{', '.join(sorted(map(str, there)))}, the model on "
            f"{', '.join(sorted(map(str, devices)))}. States are where parameters are: "
            "leave offload_states out, or CPUOffloadPolicy."
        )
    count_steps()
    HostStates(optimizer, devices.pop()).move_out()


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
