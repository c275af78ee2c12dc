"""What a backward whose optimizer steps in it leaves for the end of the step.

[Note: Torn optimizers]
A backward that raises is dropped, but what its units were stepped by before can not be
taken back: some parameters and states are a step ahead of others. The record of the
units that were stepped is a list in the optimizer, which ``lowtide.step`` brings back
with all that it holds. Where it tells of a backward that did not come to its end,
whoever goes on with the optimizer raises, until states are loaded.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from lowtide import _C

# Of the root, and its number of the backward; which unit.
Stepped = tuple[_C.Root, int, str]
# Lists in the optimizer: such units; gradients on the host; norms of gradients.
_LISTS = ("lowtide_stepped", "lowtide_parked", "lowtide_norms")


_in_units: set[int] = set()  # optimizers that step a unit now


@contextlib.contextmanager
def stepping_unit(optimizer: Optimizer) -> Iterator[None]:
    """Its groups are a unit's meanwhile."""
    _in_units.add(id(optimizer))
    try:
        yield
    finally:
        _in_units.discard(id(optimizer))


def in_unit(optimizer: Optimizer) -> bool:
    return id(optimizer) in _in_units


def attach(optimizer: Optimizer) -> tuple[list[Stepped], list[Any], list[Any]]:
    for name in _LISTS:
        setattr(optimizer, name, [])
    optimizer.grad_norm = None
    return tuple(getattr(optimizer, name) for name in _LISTS)


def is_attached(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, _LISTS[0])


def require_whole(optimizer: Optimizer, who: str) -> None:
    """Raises where a backward stepped some units and did not come to its end."""
    record: list[Stepped] = getattr(optimizer, _LISTS[0], [])
    units = [unit for root, number, unit in record if not root.ended(number)]
    if units:
        raise RuntimeError(
            f"lowtide: {who}: {type(optimizer).__name__}: expected backwards that come "
            f"to their end, got one that raised after {len(units)} units were stepped "
            f"in it, '{units[0]}' first: they are a step ahead of the others. Load "
            "model and optimizer, from a checkpoint or what you kept. Inside `with "
            "lowtide.step(model, optimizer):` such a step is undone."
        )


def loaded(optimizer: Optimizer) -> None:
    """States are others: what the step before has left counts no more."""
    if is_attached(optimizer):
        for name in _LISTS:
            getattr(optimizer, name).clear()
        optimizer.grad_norm = None
