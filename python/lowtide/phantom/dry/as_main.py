"""Runs a program as ``python`` would: a file, or ``-m`` and a module, and arguments.

It is ``__main__`` for as long as the process lives, as under the interpreter: what runs
when it is over (functions at exit, threads, processes that it starts) finds it there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path


def prepare(words: Sequence[str]) -> None:
    """The arguments that it sees, and where it finds modules."""
    of_module = words[0] == "-m"
    sys.argv = list(words[1:] if of_module else words)
    sys.path.insert(0, _folder_of(words))


def run(words: Sequence[str]) -> None:
    """Raises what it raises; ImportError for a module that is not there. ``__file__``
    and tracebacks have the path as given; the interpreter makes it absolute."""
    first = words[0]
    if first == "-m":
        main, code = _module(words[1])
        sys.argv[0] = str(main.__file__)
    elif os.path.isdir(first) or not _is_source(first):
        main, code = _archive(first)
    else:
        main, code = _file(first)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _folder_of(words: Sequence[str]) -> str:
    if words[0] == "-m":
        return os.getcwd()
    path = Path(words[0])
    if path.is_dir() or (path.exists() and not _is_source(words[0])):
        return words[0]
    return str(path.resolve().parent)


def _is_source(path: str) -> bool:
    """Not an archive that Python imports from."""
    return pkgutil.get_importer(path) is None


def _file(path: str) -> tuple[types.ModuleType, types.CodeType]:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__spec__ = None
    return main, code


def _archive(path: str) -> tuple[types.ModuleType, types.CodeType]:
    """A folder or a zip file with a ``__main__.py``."""
    importer = pkgutil.get_importer(path)
    spec = None if importer is None else importer.find_spec("__main__")
    if spec is None:
        raise ImportError(f"can't find '__main__' module in {path!r}")
    return _of_spec(spec)


def _module(name: str) -> tuple[types.ModuleType, types.CodeType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            raise ImportError(
                f"No module named {name}.__main__; {name!r} is a package and cannot "
                "be directly executed"
            )
    if spec is None:
        raise ImportError(f"No module named {name}")
    return _of_spec(spec)


def _of_spec(
    spec: importlib.machinery.ModuleSpec,
) -> tuple[types.ModuleType, types.CodeType]:
    code = spec.loader.get_code(spec.name) if spec.loader else None
    if code is None:
        raise ImportError(f"No code object available for {spec.name}")
    main = types.ModuleType("__main__")
    main.__file__ = spec.origin
    main.__cached__ = spec.cached
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    return main, code
