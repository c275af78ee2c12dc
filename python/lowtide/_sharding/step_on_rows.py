"""Elementwise optimizers of ``torch.optim`` step this rank's rows as plain tensors:
``DTensor``s cost them several times the host time.

[Note: A step on rows]
The step is the optimizer's own, run on a stand-in for it whose groups and states are of
rows; whatever it sets in a state, or in itself, is set in the optimizer. Nothing is
exchanged in the optimizer for the while of a step, so a step that raises leaves nothing
to be exchanged back, and schedulers, hooks, state dicts and checkpoints only ever see
the sharded parameters. Bits are the same: what happens to an element depends on nothing
but it, its state and its group.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowtide._sharding.local_parameter import (
    LocalParameter,
    as_sharded,
    local_parameter_of,
    rows_of,
    sharded_of,
)
from lowtide._sharding.subclass import is_extended

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

Rows = dict[int, LocalParameter]  # by the sharded parameter's id


def is_elementwise(optimizer: Optimizer) -> bool:
    """What it does to an element depends on nothing but it, its state and its group."""
    return type(optimizer) in _ELEMENTWISE


def stand_in(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], known: Rows
) -> Any:
    """``optimizer`` for a step of rows of ``groups``' parameters, or None where it has
    to step them as they are: it is no elementwise one, or rows are not all that a
    parameter or gradient is made of. ``known`` keeps rows for the next step."""
    if not is_elementwise(optimizer):
        return None
    of_rows = []
    for group in groups:
        if group["differentiable"]:
            return None
        rows = rows_with_gradients(group["params"], known)
        if rows is None:
            return None
        of_rows.append({**group, "params": rows})
    return on_rows(optimizer, of_rows, States(optimizer.state, known, {}))


def on_rows(optimizer: Optimizer, groups: Any, states: Any) -> Any:
    """``optimizer`` but for these groups and states."""
    kind: Any = type(optimizer)
    return _class_on_rows(kind)(optimizer, groups, states)


def rows_with_gradients(parameters: Iterable[Any], known: Rows) -> list[Any] | None:
    """None where rows are not all that one of them, or its gradient, is made of."""
    found: list[Any] = []
    for p in parameters:
        gradient = p.grad
        if gradient is None:
            continue
        if not isinstance(p, DTensor):
            found.append(p)
            continue
        local = p._local_tensor
        rows = known.get(id(p))
        if (
            rows is None
            or rows._sharded is not p
            or rows.data_ptr() != local.data_ptr()
        ):
            if is_extended(local):
                return None
            known[id(p)] = rows = local_parameter_of(p)
        spec = getattr(gradient, "_spec", None)
        if spec is None or spec.placements != p._spec.placements:
            return None
        found.append(rows)
    return found


class _OnRows:
    """Ahead of an optimizer's class: what is not here is the optimizer's."""

    def __init__(self, optimizer: Optimizer, groups: Any, states: Any) -> None:
        vars(self).update(_optimizer=optimizer, param_groups=groups, state=states)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)


@functools.cache
def _class_on_rows(kind: Any) -> Any:
    return type(kind.__name__, (_OnRows, kind), {})


class States(dict[Tensor, Any]):
    """States of rows that are known, made of the sharded parameters' when they are
    asked for, and of other parameters. ``elsewhere`` has what is read in the place of
    a state's rows, by their id."""

    def __init__(
        self, states: Any, known: Rows, elsewhere: Mapping[int, Tensor]
    ) -> None:
        self._states, self._known, self._elsewhere = states, known, elsewhere

    def __missing__(self, parameter: Any) -> Any:
        sharded = sharded_of(parameter)
        if self._known.get(id(sharded)) is not parameter:
            sharded = parameter  # rows that the program has given it
        state = _State(sharded, self._states[sharded], self._elsewhere)
        self[parameter] = state
        return state


class _State(dict[str, Any]):
    """One parameter's; what is set is set in the sharded parameter's, too."""

    def __init__(self, parameter: Any, state: Any, elsewhere: Any) -> None:
        for name, value in state.items():
            value = rows_of(value)
            dict.__setitem__(self, name, elsewhere.get(id(value), value))
        self._parameter, self._state = parameter, state

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._state[name] = as_sharded(self._parameter, value)
