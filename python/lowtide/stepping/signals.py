"""When a program's signal handlers run around a step: at once in its block, afterwards
where it begins, is decided and undone.

[Note: An interrupt where a step ends]
Between the last line of the block and the first of ``__exit__`` a handler could raise
in neither's ``try``, and so where the block begins. Python calls it with the frame that
it interrupts: where that is ``__enter__``'s or ``__exit__``'s, or was called from
there, the handler waits.
"""

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


class Signals:
    """Python's handlers, from :meth:`take` to :meth:`give_back`. Does nothing in a
    thread other than the main one, in which no handler runs."""

    def __init__(self, ends: tuple[CodeType, ...]) -> None:
        """``ends``: of the block, where handlers wait."""
        self._ends = ends
        self._handlers: dict[int, _Handler] = {}
        self._waiting: list[int] = []

    def take(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._handle)

    def deliver(self) -> None:
        """Calls what waited; raises what it raises."""
        while self._waiting:
            number = self._waiting.pop(0)
            self._handlers[number](number, None)

    def give_back(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:  # the block set no other
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None and caller.f_code not in self._ends:
            caller = caller.f_back
        if caller is not None:
            self._waiting.append(number)
        else:
            self._handlers[number](number, frame)
