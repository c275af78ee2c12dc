"""A function in the place of another, wherever modules hold it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any


def replace(one: Callable[..., Any], other: Callable[..., Any]) -> list[str]:
    """In all modules but lowtide's own; returns their names. Not thread-safe: no other
    thread may import meanwhile. Closures, partials and classes are not looked into."""
    places = []
    for module, name in list(holders(one)):
        vars(sys.modules[module])[name] = other
        places.append(module)
    return list(dict.fromkeys(places))


def holders(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """(module, attribute) of each that is ``function``."""
    for module_name, module in list(sys.modules.items()):
        if is_within(module_name, "lowtide"):
            continue
        # Not getattr: modules may load what they do not have yet.
        attributes = getattr(module, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        for name, value in list(attributes.items()):
            if value is function:
                yield module_name, name


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
