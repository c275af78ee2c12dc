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
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowtide._sharding.local_parameter import as_sharded, same_layout
from lowtide._sharding.neighbours import Neighbours
from lowtide._sharding.state_pool import for_states
from lowtide._sharding.subclass import is_extended


def _inside_hooks(step: Any) -> Any:
    """Without what calls the hooks of a step, with which a class's is replaced when its
    first optimizer is made."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# Of the elementwise classes.
_STEPS: dict[Any, Any] = {
    kind: _inside_hooks(kind.step)
    for kind in (
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
}


class Rows(dict[int, nn.Parameter]):
    """Of an optimizer, from step to step, by the sharded parameter's id: plain
    parameters, for which torch's functions take half the host time that they take for
    a subclass. They hold no memory that the parameter has left, as in ``Module.to``,
    and gradients only for a step."""

    steps = 0  # begun


def is_elementwise(optimizer: Optimizer) -> bool:
    """What it does to an element depends on nothing but it, its state and its group.
    Not where somebody else's function stands in the place of the class's step."""
    kind = type(optimizer)
    return _STEPS.get(kind) is _inside_hooks(kind.step)


def stand_in(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]],
    known: Rows,
    neighbours: Neighbours | None = None,
) -> Any:
    """``optimizer`` for a step of rows of ``groups``' parameters, or None where it has
    to step them as they are: it is no elementwise one, or rows are not all that a
    parameter or gradient is made of. ``known`` keeps rows for the next step; with
    ``neighbours``, which it keeps, too, they step as one."""
    if not is_elementwise(optimizer):
        return None
    of_rows: list[dict[str, Any]] = []
    states = States(optimizer.state, {})
    stood_in = on_rows(optimizer, known, of_rows, states)
    if neighbours is not None:
        neighbours.end(optimizer)
    for group in groups:
        if group["differentiable"]:
            return None
        wholes, others = [], group["params"]
        if neighbours is not None:
            found, others = neighbours.wholes_of(optimizer, others)
            states.update(found)
            wholes = [whole for whole, _ in found]
        rows = rows_with_gradients(others, known)
        if rows is None:
            if neighbours is not None:
                neighbours.leave()
            return None
        of_rows.append({**group, "params": [*wholes, *rows]})
    return stood_in


def uncounted(stood_in: Any, neighbours: Neighbours) -> list[Tensor]:
    """What its step writes without counting it as versions: what torch's fused ones
    do, and parts of a whole."""
    as_one = (p for run in neighbours.stepping for p in run.parameters)
    written = [p._local_tensor for p in as_one]
    for group in stood_in.param_groups:
        if group.get("fused"):
            written += group["params"]
    return written


def on_rows(optimizer: Optimizer, known: Rows, groups: Any, states: Any) -> Any:
    """``optimizer`` but for these groups and states, for one step, which begins."""
    kind: Any = type(optimizer)
    return _class_on_rows(kind)(optimizer, known, groups, states)


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
        if not isinstance(gradient, DTensor):
            return None
        spec = p._spec
        if gradient._spec is not spec and not same_layout(gradient._spec, spec):
            return None
        local = p._local_tensor
        rows = known.get(id(p))
        if (
            rows is None
            or rows.local() is not local
            or rows.data_ptr() != local.data_ptr()
        ):
            if is_extended(local):
                return None
            known[id(p)] = rows = _plain_rows_of(p, known)
        rows.grad = gradient._local_tensor
        found.append(rows)
    return found


def _plain_rows_of(p: Any, known: Rows) -> Any:
    """``lowtide_sharded``: the parameter; ``local``: what they are of."""
    local = p._local_tensor
    rows: Any = nn.Parameter(local.detach(), p.requires_grad)
    rows.grad_dtype = None  # a program may give gradients another one
    rows.lowtide_sharded = p
    forget = functools.partial(_forget, weakref.ref(known), id(p))
    rows.local = weakref.ref(local, forget)
    return rows


def _forget(known: "weakref.ref[Rows]", number: int, local: Any) -> None:
    rows: Any = known()
    if rows is not None and number in rows and rows[number].local is local:
        del rows[number]


class _OnRows:
    """Ahead of an optimizer's class: what is not here is the optimizer's. It lives for
    one step; the traceback of one that raised may keep it."""

    def __init__(
        self, optimizer: Optimizer, known: Rows, groups: Any, states: Any
    ) -> None:
        known.steps += 1
        vars(self).update(_optimizer=optimizer, param_groups=groups, state=states)
        vars(self).update(_known=known, _step=known.steps)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Of all elementwise classes; makes states that are not there."""
        makes: Any = super()
        with for_states(self._optimizer, group["params"]):
            return makes._init_group(group, *lists)

    def __del__(self) -> None:
        if self._step == self._known.steps:  # no later one has gradients there
            for rows in self._known.values():
                rows.grad = None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)


@functools.cache
def _class_on_rows(kind: Any) -> Any:
    return type(kind.__name__, (_OnRows, kind), {})


class States(dict[Tensor, Any]):
    """States of rows, made of the sharded parameters' when they are asked for, and of
    other parameters. ``elsewhere`` has what is read in the place of a state's rows, by
    their id."""

    def __init__(self, states: Any, elsewhere: Mapping[int, Tensor]) -> None:
        self._states, self._elsewhere = states, elsewhere

    def __missing__(self, parameter: Any) -> Any:
        p = getattr(parameter, "lowtide_sharded", parameter)
        of_p, elsewhere = self._states[p], self._elsewhere
        self[parameter] = state = _State(of_p)
        state.parameter, state.sharded = p, of_p
        for name, value in of_p.items():
            if isinstance(value, DTensor):
                if value._spec is not p._spec:
                    _require_same_layout(p, name, value)
                value = value._local_tensor
                _set(state, name, value)
            if elsewhere and (there := elsewhere.get(id(value))) is not None:
                _set(state, name, there)
        return state


_set = dict.__setitem__


class _State(dict[str, Any]):
    """One parameter's; what is set is set in the sharded parameter's, too."""

    __slots__ = ("parameter", "sharded")
    parameter: Any
    sharded: dict[str, Any]

    def __setitem__(self, name: str, value: Any) -> None:
        _set(self, name, value)
        self.sharded[name] = as_sharded(self.parameter, value)


def _require_same_layout(parameter: Any, name: str, value: Any) -> None:
    if not same_layout(value._spec, parameter._spec):
        raise ValueError(
            f"lowtide: optimizer: expected state '{name}' of its parameter's "
            f"placements, {parameter._spec}, got {value._spec}. Load it by "
            "torch.distributed.checkpoint."
        )
