"""Names of the regions of lowtide.spmd that run forward in this thread: what sends on
its own asks."""

from __future__ import annotations

import threading


class _Names(threading.local):
    def __init__(self) -> None:
        self.open: list[str] = []


_names = _Names()


def enter(name: str) -> None:
    _names.open.append(name)


def leave() -> None:
    _names.open.pop()


def innermost() -> str | None:
    return _names.open[-1] if _names.open else None
