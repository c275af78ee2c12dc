"""Conversions of modules: ``to``, ``float``, ``to_empty`` and whatever else calls
``nn.Module._apply``, which swaps the tensors inside the parameters. It refuses where
somebody in C++ has them: units let go of them, and take over what has come.

A program may convert any module, a norm among the root's, say, or the model inside of
an adapter's: every module that has parameters of units has an `_apply` of its own.

One that changes nothing leaves a gathered unit as it is: modules convert what is inside
them in their forward, to be sure of a dtype that it has already."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn


class Unit(Protocol):
    """What a conversion needs of a unit's state."""

    @property
    def is_converted(self) -> bool: ...
    @property
    def is_gathered(self) -> bool: ...
    def begin_conversion(self) -> None: ...
    def end_conversion(self) -> None: ...


class _Conversion:
    """The `_apply` of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.units: weakref.WeakSet[Unit] = weakref.WeakSet()

    def __call__(self, convert: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        gathered = any(unit.is_gathered for unit in self.units)
        if gathered and _changes_nothing(convert, module):
            return module
        with converted(self.units):
            return type(module)._apply(module, convert, *args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module is of no unit."""
        module = self._module()
        assert module is not None
        return functools.partial, (type(module)._apply, module)


def watch_conversions(modules: Iterable[nn.Module], unit: Unit) -> None:
    """``unit``: it has parameters of theirs."""
    for module in modules:
        module.__dict__.setdefault("_apply", _Conversion(module)).units.add(unit)


def _changes_nothing(convert: Callable[..., Any], module: nn.Module) -> bool:
    """Tried on small tensors of the same kinds as the module's."""
    kinds = {
        (tensor.dtype, tensor.device, tensor.ndim)
        for tensor in [*module.parameters(), *module.buffers()]
    }
    for dtype, device, ndim in kinds:
        with torch.no_grad():
            small = torch.zeros((2,) * ndim, dtype=dtype, device=device)
            before = (small._version, small.is_shared())
            if convert(small) is not small:
                return False
            if (small._version, small.is_shared()) != before:
                return False
    return True


@contextmanager
def converted(units: Iterable[Unit]) -> Iterator[None]:
    """Within, the parameters of these units may be swapped. Those of a conversion
    around this one are left to it."""
    units = [unit for unit in units if not unit.is_converted]
    for unit in units:
        unit.begin_conversion()
    try:
        yield
    finally:
        for unit in units:
            unit.end_conversion()
