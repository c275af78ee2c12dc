"""Processes that ``multiprocessing`` starts anew (spawn, forkserver) run the program's
main module again: they are bound before that, as their parent was.

The parent's arguments travel to them as an object that is a call when it is unpickled,
and multiprocessing unpickles them before it imports the main module. A child that never
imports FSDP2, as a DataLoader's worker, imports nothing for it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from types import ModuleType
from typing import Any

_FSDP2 = "torch.distributed.fsdp"


class _Arguments(list[str]):
    """``sys.argv`` of the child."""

    def __init__(self, arguments: list[str], enter: Callable[[Any], None], told: Any):
        super().__init__(arguments)
        self._enter, self._told = enter, told

    def __reduce__(self) -> tuple[Callable[..., list[str]], tuple[Any, ...]]:
        return _arrive, (list(self), self._enter, self._told)


def _arrive(arguments: list[str], enter: Callable[[Any], None], told: Any) -> list[str]:
    bind_in_children(enter, told)  # of its own
    if _FSDP2 in sys.modules:
        enter(told)
    else:
        sys.meta_path.insert(0, _AtImport(lambda: enter(told)))
    return arguments


def bind_in_children(enter: Callable[[Any], None], told: Any) -> Callable[[], None]:
    """Children call ``enter(told)``, a function of a module, where they import FSDP2,
    and so do theirs. Returns what ends it."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        data["sys_argv"] = _Arguments(data.get("sys_argv", []), enter, told)
        return data

    spawn.get_preparation_data = get_preparation_data

    def undo() -> None:
        spawn.get_preparation_data = prepare

    return undo


class _AtImport(importlib.abc.MetaPathFinder):
    """Calls ``then`` once FSDP2 has been imported, before who imports it goes on."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _FSDP2:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:  # get_source and the like
        return getattr(self._loader, name)
