"""Runs a program as ``python`` would, and says what is not there."""

import importlib.util
import sys
from pathlib import Path

from lowtide.phantom.dry import as_main
from lowtide.planning.request import Script


def run_script(script: Script) -> None:
    first, *rest = script.words
    as_main.prepare(script.words)
    if first == "-m":
        _require_module(rest[0])
    else:
        require_file(first)
    before = sys.modules["__main__"]
    try:
        as_main.run(script.words)
    except SystemExit as exit:
        if exit.code not in (None, 0):
            raise
    finally:
        # Optimizers that nobody else holds are over.
        sys.modules["__main__"] = before


def require_file(path: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"lowtide: plan: expected a Python file, got {path!r}. Check the path."
        )


def _require_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        found = False
    if not found:
        raise ModuleNotFoundError(
            f"lowtide: plan: expected a module that can be imported, got {name!r}. Run "
            "the command where `python -m` finds it."
        )
