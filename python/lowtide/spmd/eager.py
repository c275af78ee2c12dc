"""What torch.compile does not look into: it breaks its graph there, and the code runs
as it is. What ``torch.compiler.disable`` does, without importing Dynamo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
    set_eval_frame,
)

Fn = TypeVar("Fn", bound=Callable[..., Any])
_REASON = "regions of lowtide.spmd are for eager code"


def eager(fn: Fn) -> Fn:
    """``fn`` and what it calls run outside of compiled graphs."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = suspend_compiler()
        try:
            return fn(*args, **kwargs)
        finally:
            resume_compiler(compiler)

    return not_traced(call)  # type: ignore[return-value]


def not_traced(fn: Fn) -> Fn:
    """The frame of ``fn`` is in no graph; what it calls may be in one."""
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = _REASON
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(fn.__code__, skip)
    return fn


def suspend_compiler() -> Any:
    """From here on what this thread calls runs as it is. Returns what
    :func:`resume_compiler` takes."""
    return set_eval_frame(None)


def resume_compiler(compiler: Any) -> None:
    set_eval_frame(compiler)
