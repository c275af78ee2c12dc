"""``local_parameters``: the shards as plain tensors, for optimizers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowtide._state.unit import unit_state

__all__ = ["local_parameters", "sharded_optimizer"]


class LocalParameter(nn.Parameter):
    """This rank's rows of a sharded parameter: the same bytes, and as ``.grad`` the
    same rows of the sharded parameter's, so setting either to None does both."""

    _sharded: nn.Parameter

    @property
    def grad(self) -> Tensor | None:
        gradient = self._sharded.grad
        return None if gradient is None else _local_of(gradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError(
                "lowtide: local_parameters: expected .grad to be set to None, got a "
                "tensor. Change the gradient in place, or set the sharded parameter's."
            )
        self._sharded.grad = None


def local_parameters(model: nn.Module) -> list[nn.Parameter]:
    """This rank's rows of ``model.parameters()``, in that order, as plain parameters
    for an optimizer: a ``DTensor`` costs it several times the host time. Parameters
    that are not sharded are returned as they are.

    Everything else stays with the model: clip ``model.parameters()``, and save and
    load the optimizer's state inside :func:`sharded_optimizer`. Call it after the
    model has its storage, dtype and weights' places for good: ``to_empty``, ``to`` and
    ``load_state_dict(assign=True)`` make other tensors.

    Raises ValueError for a model without a unit.
    """
    if all(unit_state(module) is None for module in model.modules()):
        raise ValueError(
            "lowtide: local_parameters: expected a model sharded by lowtide, got "
            f"{type(model).__name__} without a unit. Call fully_shard or wrap first."
        )
    return [_local_parameter(p) for p in model.parameters()]


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    local = torch.Tensor._make_subclass(
        LocalParameter, parameter._local_tensor.detach(), parameter.requires_grad
    )
    assert isinstance(local, LocalParameter)
    local._sharded = parameter
    return local


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
    _exchange(optimizer, {id(p): p._sharded for p in locals_}, _as_sharded)
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


def _as_sharded(parameter: DTensor, value: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter._local_tensor.shape:
        if value.dim() > 0:
            return DTensor(value, parameter._spec, requires_grad=False)
    return value


def _as_local(parameter: LocalParameter, value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _local_of(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient
