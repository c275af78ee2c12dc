"""Functions of ours that run in the middle of a program's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Dynamo, which looks at every frame below a compiled call, compiles neither it nor
    what it calls. In a part of the program that compiles it would say that it could
    not, and the part would run as it is."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function
