"""Phantom devices for tests.  A process has at most one, so each kind lives in a
process of its own, and tests pass module-level functions to it:

    def allocated_by(mib): ...

    def test_it(phantom):
        assert phantom("meta").run(allocated_by, 12) == ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.ranks import RankPool

MIB = 1 << 20


_installed = False


def install(mode: str, settings: dict[str, Any]) -> None:
    """Once per process; a pool starts a new one when a function fails."""
    global _installed
    import lowtide.phantom

    if not _installed:
        lowtide.phantom.install(mode, **settings)
    _installed = True


@dataclass(frozen=True)
class Process:
    pool: RankPool
    mode: str
    settings: dict[str, Any]

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.pool.run(install, self.mode, self.settings)
        return self.pool.run(fn, *args, **kwargs)[0]


PhantomOf = Callable[..., Process]


class Processes:
    """One process for every mode and settings asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Process] = {}

    def __call__(self, mode: str, **settings: Any) -> Process:
        key = f"{mode} {sorted(settings.items())}"
        if key not in self._made:
            self._made[key] = Process(RankPool(1, group=False), mode, settings)
        return self._made[key]

    def close(self) -> None:
        for process in self._made.values():
            process.pool.close()
