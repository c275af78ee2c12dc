"""What belongs to one backward: autograd's graph task that runs in this thread."""

import functools
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_Value = TypeVar("_Value")


def in_backward() -> bool:
    """Whether autograd runs in this thread: a forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _Owned(Generic[_Value]):
    def __init__(self, value: _Value) -> None:
        self.value = value

    def end(self, at_end: Callable[[_Value], None] | None) -> None:
        if at_end is not None:
            at_end(self.value)


class PerBackward(Generic[_Value]):
    """A value of its own for every backward. One that raises drops its value, and the
    next backward begins anew."""

    def __init__(self) -> None:
        # By graph task, whose callback owns the value.
        self._values: weakref.WeakValueDictionary[int, _Owned[_Value]] = (
            weakref.WeakValueDictionary()
        )

    def get(
        self,
        make: Callable[[], _Value],
        at_end: Callable[[_Value], None] | None = None,
    ) -> _Value:
        """The value of the backward that runs in this thread. The first call makes it;
        ``at_end``, which may raise, is called with it when that backward is over."""
        task = torch._C._current_graph_task_id()
        assert task != -1
        owned = self._values.get(task)
        if owned is None:
            owned = self._values[task] = _Owned(make())
            torch.autograd.Variable._execution_engine.queue_callback(
                functools.partial(owned.end, at_end)
            )
        return owned.value
