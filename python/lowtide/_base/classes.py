"""Classes of modules: those lowtide puts in the place of a program's, and what the
program calls them."""

import weakref
from collections.abc import Callable

from torch import nn


class ClassSwap:
    """Turns modules into instances of a class made from their own, which ``make``
    makes once for each class."""

    def __init__(self, make: Callable[[type], type]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()

    def apply(self, module: nn.Module) -> None:
        original = type(module)
        made = self._made.get(original)
        if made is None:
            made = self._made[original] = self._make(original)
        module.__class__ = made


def original_class(module: nn.Module) -> type:
    """The program's, also of a module that ``fully_shard`` made an ``FSDPModule``."""
    kind = type(module)
    original: type = getattr(kind, "_original_class", kind)
    return original


def class_name(module: nn.Module) -> str:
    return original_class(module).__name__
