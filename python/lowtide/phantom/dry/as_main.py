"""Runs a program as ``python`` would: a file, or ``-m`` and a module, and arguments."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def prepare(words: Sequence[str]) -> None:
    """The arguments that it sees, and where it finds modules."""
    of_module = words[0] == "-m"
    sys.argv = list(words[1:] if of_module else words)
    folder = os.getcwd() if of_module else Path(words[0]).resolve().parent
    sys.path.insert(0, str(folder))


def run(words: Sequence[str]) -> None:
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
