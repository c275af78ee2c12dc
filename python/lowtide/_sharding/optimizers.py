"""What an optimizer's step means for sharded models: rows suffice for it, what is still
gathered is old behind it, and one of parameters that are no longer there changes
nothing."""

import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowtide._sharding import stepped
from lowtide._sharding.device_steps import device_steps_of
from lowtide._sharding.local_parameter import sharded_of
from lowtide._sharding.neighbours import Neighbours
from lowtide._sharding.owners import became, replacements
from lowtide._sharding.state_pool import is_first_step, let_go
from lowtide._sharding.step_on_rows import Rows, stand_in, uncounted
from lowtide._sharding.unit import UnitState, alive

_units: "weakref.WeakSet[UnitState]" = weakref.WeakSet()  # of every root
_KNOWN = "lowtide_known"  # an attribute of optimizers: it may lead to them
_num_roots = 0


@dataclass
class _Known:
    """What is known of an optimizer as long as `stamp` is the same."""

    stamp: tuple[int, int, int]
    units: list["weakref.ref[UnitState]"]  # one for every root it steps
    warned: bool
    by_rows: bool  # the program has given it rows already
    rows: Rows = field(default_factory=Rows)
    neighbours: Neighbours = field(default_factory=Neighbours)
    # What the step that is under way writes without counting it as versions, as torch's
    # fused ones do, and foreach ones of DTensors; None: parameters with a gradient.
    written: "list[Tensor] | None" = None


def watch_optimizers(units: list[UnitState]) -> None:
    """``units`` have got a root: from now on optimizers' steps count."""
    global _num_roots
    _num_roots += 1
    _units.update(units)
    count_steps()


@functools.cache
def count_steps() -> None:
    """Of all optimizers, from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    known = _known_of(optimizer)
    if known is None or not args or args[0] is not optimizer:
        return None
    fused = any(group.get("fused") for group in optimizer.param_groups)
    known.written = None if fused else []
    if (steps := device_steps_of(optimizer)) is not None:
        return (steps.stand_in(known.rows), *args[1:]), kwargs
    with_closure = any(each is not None for each in (*args[1:], *kwargs.values()))
    on_rows = None
    # In the first one states are made: see [Note: States lie apart].
    by_us = not known.by_rows or is_first_step(optimizer)
    if known.units and by_us and not with_closure:  # which makes gradients itself
        groups = optimizer.param_groups
        on_rows = stand_in(optimizer, groups, known.rows, known.neighbours)
    if on_rows is None:
        if not known.by_rows:
            known.written = None
        return None
    known.written = uncounted(on_rows, known.neighbours)
    return (on_rows, *args[1:]), kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (known := _known_of(optimizer)) is None:
        return
    known.neighbours.end(optimizer)
    let_go(optimizer)
    for reference in known.units:
        unit = reference()
        if unit is not None and unit.root is not None:
            unit.root.optimizer_stepped()
    written, known.written = known.written, None
    if written is None and known.units:
        of_gradients = (p for p in _parameters_of(optimizer) if p.grad is not None)
        written = [p for p in of_gradients if isinstance(p, DTensor)]
    increment_version(written or [])


def _known_of(optimizer: Optimizer) -> _Known | None:
    """None where what steps counts by itself: compiled code counts the writes."""
    if torch.compiler.is_compiling() or stepped.in_unit(optimizer):
        return None
    known = getattr(optimizer, _KNOWN, None)
    stamp = (_num_roots, replacements(), len(optimizer.param_groups))
    if known is None or known.stamp != stamp:
        known = _look_at(optimizer, stamp, warned=known is not None and known.warned)
        setattr(optimizer, _KNOWN, known)
    return known


def steps_of(unit: UnitState) -> int:
    """How often parameters of its model were stepped. Foreach and fused optimizers do
    not count their writes to a DTensor as versions."""
    return unit.root.optimizer_steps if unit.root is not None else 0


def modules_around(optimizer: Optimizer) -> list[nn.Module]:
    """Modules of units that have a parameter it steps, or such a unit inside: whole
    models among them, also before their first forward."""
    stepped = {id(parameter) for parameter in _parameters_of(optimizer)}
    own = {
        module
        for unit in alive
        if any(id(parameter.shard) in stepped for parameter in unit.parameters)
        for module in unit.modules
    }
    return [
        module
        for unit in alive
        for module in unit.modules
        if not own.isdisjoint(module.modules())
    ]


def devices_of(parameters: Iterable[Tensor]) -> set[torch.device]:
    """Of the units that have one of them."""
    wanted = {id(sharded_of(p)) for p in parameters}
    return {
        unit.device
        for unit in alive
        if any(id(parameter.shard) in wanted for parameter in unit.parameters)
    }


def offloaded(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that ``CPUOffloadPolicy`` has on the host."""
    of_units = {
        id(parameter.shard)
        for unit in alive
        if unit.settings.host is not None
        for parameter in unit.parameters
    }
    return [p for p in parameters if id(sharded_of(p)) in of_units]


def _look_at(
    optimizer: Optimizer, stamp: tuple[int, int, int], *, warned: bool
) -> _Known:
    parameters = list(_parameters_of(optimizer))
    stepped = {id(parameter) for parameter in parameters}
    by_root: dict[Any, weakref.ref[UnitState]] = {}
    gathered: dict[int, str] = {}
    for unit in _units:
        gathered |= {
            id(parameter.full): parameter.name for parameter in unit.parameters
        }
        if any(id(parameter.shard) in stepped for parameter in unit.parameters):
            by_root.setdefault(unit.root, weakref.ref(unit))
    names = [
        name
        for p in parameters
        if (name := gathered.get(id(p)) or became(p)) is not None
    ]
    if names and not warned:
        _warn(optimizer, names, len(parameters))
    by_rows = not any(
        isinstance(p, DTensor) for g in optimizer.param_groups for p in g["params"]
    )
    return _Known(stamp, list(by_root.values()), warned or bool(names), by_rows)


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield sharded_of(parameter)


def _warn(optimizer: Optimizer, names: list[str], count: int) -> None:
    warnings.warn(
        f"lowtide: {type(optimizer).__name__}: expected the model's sharded "
        f"parameters, got {len(names)} of {count} that are not: gathered ones, or what "
        "fully_shard or load_state_dict(assign=True) has replaced, the first is "
        f"'{names[0]}'. Steps do not change the model: make the optimizer again, of "
        "model.parameters() before a forward.",
        stacklevel=6,
    )
