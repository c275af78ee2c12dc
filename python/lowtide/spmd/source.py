"""The user's line that is running."""

from __future__ import annotations

import functools
import os
import sys

import torch

_OWN = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


def line() -> str:
    """ "train.py:12", relative to the working directory where that is shorter."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def _short(name: str) -> str:
    try:
        return min(name, os.path.relpath(name), key=len)
    except (OSError, ValueError):  # no working directory, another drive
        return name
