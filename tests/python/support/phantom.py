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


def install(mode: str, settings: dict[str, Any]) -> None:
    import lowtide.phantom

    lowtide.phantom.install(mode, **settings)


@dataclass(frozen=True)
class Process:
    pool: RankPool

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.pool.run(fn, *args, **kwargs)[0]


PhantomOf = Callable[..., Process]


class Processes:
    """One process for every mode and settings asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Process] = {}

    def __call__(self, mode: str, **settings: Any) -> Process:
        key = f"{mode} {sorted(settings.items())}"
        if key not in self._made:
            process = Process(RankPool(1, group=False))
            process.run(install, mode, settings)
            self._made[key] = process
        return self._made[key]

    def close(self) -> None:
        for process in self._made.values():
            process.pool.close()
