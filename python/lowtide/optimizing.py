"""How optimizers take sharded parameters: as plain rows, on the device what is on the
host."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lowtide._sharding.device_steps import DeviceSteps, device_steps_of
from lowtide._sharding.host_states import HostStates
from lowtide._sharding.local_parameter import (
    LocalParameter,
    as_sharded,
    local_parameter_of,
    rows_of,
    sharded_of,
)
from lowtide._sharding.optimizers import count_steps, devices_of, offloaded
from lowtide._sharding.step_on_rows import is_elementwise
from lowtide._sharding.subclass import is_extended
from lowtide._sharding.unit import units_of

__all__ = ["local_parameters", "offload_states", "sharded_optimizer", "step_on_device"]

States = Literal["host", "device"]


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
            model, as ``CPUOffloadPolicy`` has them: their states are there, too, and
            :func:`step_on_device` is for them.
        RuntimeError: In ``step()``, where the host has no memory, and for parameters or
            gradients whose rows are not plain tensors.
    """
    who = "lowtide: offload_states"
    device = _device_of("offload_states", optimizer)
    if device_steps_of(optimizer) is not None:
        return
    there = {rows_of(sharded_of(p)).device for p in _parameters_of(optimizer)}
    if there != {device}:
        raise ValueError(
            f"{who}: expected all parameters on the device of their model, got them on "
            f"{', '.join(sorted(map(str, there)))}, the model on {device}. States are "
            "where parameters are: call step_on_device instead, or leave "
            "CPUOffloadPolicy out."
        )
    count_steps()
    DeviceSteps(optimizer, device, HostStates(device)).place()


def step_on_device(
    optimizer: torch.optim.Optimizer, *, states: States = "host"
) -> None:
    """From now on ``optimizer``, of parameters that ``CPUOffloadPolicy`` has on the
    host, steps on the device: a unit's parameters, gradients and states are copied
    there ahead of its step and back behind it, those of two units at a time. Otherwise
    it steps on the CPU, where they are. ``step()`` returns when all are on the host.

    Args:
        states: Where those that are as long as a parameter are between steps:
            ``"host"``, page-locked, or ``"device"``, so that parameters and gradients
            alone are on the host. With :func:`optimize_in_backward`, which keeps no
            gradients, that is parameters alone.

    Raises:
        ValueError: For an optimizer that is not one of ``torch.optim``'s elementwise
            ones, or has no parameters that ``CPUOffloadPolicy`` has on the host, or
            some that are there without it; and where ``offload_states`` was called
            before, or this with other ``states``.
        RuntimeError: In ``step()``, where the host has no memory, and for parameters or
            gradients whose rows are not plain tensors.
    """
    who = "lowtide: step_on_device"
    if states not in get_args(States):
        raise ValueError(
            f"{who}: expected states to be 'host' or 'device', got {states!r}. Write "
            "one of these."
        )
    device = _device_of("step_on_device", optimizer)
    if (known := device_steps_of(optimizer)) is not None:
        if known.brings_parameters and known.states_on_host == (states == "host"):
            return
        raise ValueError(
            f"{who}: expected one call for an optimizer, got another, of other states, "
            f"or offload_states before. Call step_on_device(optimizer, states="
            f"{states!r}) alone."
        )
    parameters = _parameters_of(optimizer)
    on_host = offloaded(parameters)
    if not on_host:
        raise ValueError(
            f"{who}: expected parameters that CPUOffloadPolicy has on the host, got "
            f"none among {len(parameters)}. Shard the model with it, or call "
            "offload_states: that is for states alone."
        )
    known_there = {*map(id, on_host)}
    others = [
        p
        for p in parameters
        if id(p) not in known_there and rows_of(sharded_of(p)).device != device
    ]
    if others:
        raise ValueError(
            f"{who}: expected parameters on {device}, or on the host because of "
            f"CPUOffloadPolicy, got {len(others)} others, one of shape "
            f"{tuple(others[0].shape)} on {others[0].device}. Give these an optimizer "
            "of their own."
        )
    count_steps()
    kept = HostStates(device) if states == "host" else None
    DeviceSteps(optimizer, device, kept, brings_parameters=True).place()


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _device_of(function: str, optimizer: torch.optim.Optimizer) -> torch.device:
    """Of the units whose parameters it has."""
    who, name = f"lowtide: {function}", type(optimizer).__name__
    if not is_elementwise(optimizer):
        raise ValueError(
            f"{who}: expected an elementwise optimizer of torch.optim, got {name}. "
            "Leave it out, or give the model "
            "offload_policy=CPUOffloadPolicy(), with which any optimizer steps on the "
            "CPU."
        )
    devices = devices_of(_parameters_of(optimizer))
    if not devices:
        raise ValueError(
            f"{who}: expected an optimizer of a model's sharded parameters, got {name} "
            "with none of them. Make it behind fully_shard, of model.parameters()."
        )
    if len(devices) > 1:
        raise ValueError(
            f"{who}: expected a model on one device, got parameters of units on "
            f"{', '.join(sorted(map(str, devices)))}. Make an optimizer for each."
        )
    return devices.pop()


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
