"""One unit's step of an optimizer that has all units' parameters.

[Note: An optimizer, unit by unit]
What an elementwise optimizer does to a parameter depends on that parameter, its state
and its group's settings. So one step of all is as many steps of a unit's parameters
each, by the same optimizer, whose groups are for that while the unit's parts of them.
Where rows suffice it sees this rank's rows, as plain parameters: sharded ones cost it
several times the host time. Between steps groups and states speak of the sharded
parameters, as schedulers, state dicts and checkpoints expect.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowtide._sharding import stepped
from lowtide._sharding.local_parameter import as_sharded
from lowtide._sharding.subclass import is_extended

# What they do to an element depends on nothing but it, its state and its group.
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

# Of a unit: numbers of groups, and those of their parameters.
Chosen = list[tuple[int, list[Tensor]]]


def step_chosen(optimizer: Optimizer, chosen: Chosen) -> None:
    """Steps ``chosen``, which have gradients, on the current stream."""
    groups, states = optimizer.param_groups, optimizer.state
    by_rows = type(optimizer) in _ELEMENTWISE
    rows = _Rows(states) if by_rows else None
    of_unit = [
        {**groups[i], "params": list(map(rows.of, ps)) if rows is not None else ps}
        for i, ps in chosen
    ]
    optimizer.param_groups = of_unit
    if rows is not None:
        optimizer.state = rows.states
    try:
        with stepped.stepping_unit(optimizer):
            _step_of(optimizer)(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    if rows is not None:
        rows.write_back()
    for (i, _), used in zip(chosen, of_unit, strict=True):
        _require_unchanged(optimizer, groups[i], used)


class _Rows:
    """Sharded parameters' rows and their states' for the while of a step."""

    def __init__(self, states: Any) -> None:
        self._states = states  # of the sharded
        self._sharded: dict[Tensor, DTensor] = {}
        self.states: defaultdict[Tensor, Any] = defaultdict(dict)

    def of(self, p: Tensor) -> Tensor:
        if not isinstance(p, DTensor) or is_extended(p._local_tensor):
            if p in self._states:
                self.states[p] = self._states[p]
            return p
        assert isinstance(p.grad, DTensor)
        rows = nn.Parameter(p._local_tensor)
        rows.grad = p.grad._local_tensor
        self._sharded[rows] = p
        if p in self._states:
            self.states[rows] = {
                name: value._local_tensor if isinstance(value, DTensor) else value
                for name, value in self._states[p].items()
            }
        return rows

    def write_back(self) -> None:
        """What the step has made or replaced; the rest are the same bytes."""
        for rows, values in self.states.items():
            p = self._sharded.get(rows)
            if p is None:
                self._states[rows] = values
                continue
            old = self._states[p]
            for name in [name for name in old if name not in values]:
                del old[name]
            for name, value in values.items():
                before = old.get(name)
                if isinstance(before, DTensor):
                    before = before._local_tensor
                if before is not value or name not in old:
                    old[name] = as_sharded(p, value)


def _step_of(optimizer: Optimizer) -> Any:
    """Without the hooks of a step, which there is only one of."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _require_unchanged(
    optimizer: Optimizer, group: dict[str, Any], used: dict[str, Any]
) -> None:
    changed = [
        name
        for name in (*used, *group)
        if name != "params" and (name not in group or used.get(name) is not group[name])
    ]
    if changed:
        raise RuntimeError(
            f"lowtide: optimize_in_backward: expected an optimizer whose step changes "
            f"parameters and their states, got {type(optimizer).__name__}, whose step "
            f"changes its groups, too: {', '.join(map(repr, changed))}. It would do so "
            "for every unit. Step it behind the backward."
        )
