"""What runs around an optimizer's ``step``."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

# The optimizer, its step as it was, and what that was given.
Around = Callable[[Optimizer, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def step_around(optimizer: Optimizer, around: Around) -> None:
    """From now on ``step`` calls ``around``, which calls the step as it was."""
    optimizer.step = _Step(optimizer, around)  # type: ignore[method-assign]


class _Step:
    """``optimizer.step``. As schedulers do, it stands in the optimizer's own attributes
    and refers to it weakly, or its states would wait for the garbage collector;
    ``__func__`` is what they wrap."""

    def __init__(self, optimizer: Optimizer, around: Around) -> None:
        step: Any = optimizer.step
        of_class = isinstance(step, types.MethodType) and step.__self__ is optimizer
        call = step.__func__ if of_class else lambda _, *args, **kw: step(*args, **kw)
        functools.update_wrapper(self, step)
        self._optimizer = weakref.ref(optimizer)

        @functools.wraps(call)
        def wrapped(optimizer: Optimizer, *args: Any, **kw: Any) -> Any:
            return around(optimizer, call, args, kw)

        self.__func__ = wrapped

    def __call__(self, *args: Any, **kw: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        return self.__func__(optimizer, *args, **kw)
