"""One unit's step of an optimizer that has all units' parameters.

[Note: An optimizer, unit by unit]
What an elementwise optimizer does to a parameter depends on that parameter, its state
and its group's settings. So one step of all is as many steps of a unit's parameters
each, by the same optimizer, whose groups are for that while the unit's parts of them.
Where rows suffice it sees this rank's rows, as plain parameters: sharded ones cost it
several times the host time (see [Note: A step on rows]).
"""

from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lowtide._sharding import stepped
from lowtide._sharding.device_steps import device_steps_of
from lowtide._sharding.neighbours import Neighbours
from lowtide._sharding.step_on_rows import Rows, stand_in, uncounted
from lowtide._sharding.unit import UnitState

# Of a unit: numbers of groups, and those of their parameters.
Chosen = list[tuple[int, list[Tensor]]]


def step_chosen(
    optimizer: Optimizer,
    unit: UnitState,
    chosen: Chosen,
    known: Rows,
    neighbours: Neighbours,
) -> None:
    """Steps those of ``chosen`` that have gradients, on the current stream. ``known``
    and ``neighbours`` are kept for the unit's next step."""
    groups = optimizer.param_groups
    of_unit = [{**groups[i], "params": parameters} for i, parameters in chosen]
    step = _step_of(optimizer)
    if (steps := device_steps_of(optimizer)) is not None:
        step(steps.stand_in_for([(unit, of_unit)], known))
        return
    on_rows = stand_in(optimizer, of_unit, known, neighbours)
    if on_rows is not None:
        written = uncounted(on_rows, neighbours)
        step(on_rows)
        increment_version(written)
        neighbours.end(optimizer)
        return
    optimizer.param_groups = of_unit
    try:
        with stepped.stepping_unit(optimizer):
            step(optimizer)
    finally:
        optimizer.param_groups = groups
    for (i, _), used in zip(chosen, of_unit, strict=True):
        _require_unchanged(optimizer, groups[i], used)


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
