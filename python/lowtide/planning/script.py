"""Runs a program as ``python`` would."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

from lowtide.planning.request import Module, Script


def run_script(script: Script) -> None:
    require_file(script.path)
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, str(Path(script.path).resolve().parent))
    try:
        runpy.run_path(script.path, run_name="__main__")
    except SystemExit as exit:
        _require_success(exit)


def run_module(module: Module) -> None:
    sys.path.insert(0, os.getcwd())
    _require_module(module.name)
    sys.argv = [module.name, *module.arguments]
    try:
        runpy.run_module(module.name, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        _require_success(exit)


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


def _require_success(exit: SystemExit) -> None:
    if exit.code not in (None, 0):
        raise exit
