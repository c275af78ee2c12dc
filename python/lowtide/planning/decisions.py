"""Where a program decides by values that nobody computed."""

import sys
from collections.abc import Sequence
from typing import Any

from lowtide.planning import finiteness
from lowtide.planning.stacks import Line

# Functions that return a truth value which follows from values.
_TRUTHS = {"__bool__", "__contains__", "allclose", "is_nonzero", "item"}
_MAX_SHOWN = 5


class Decisions:
    """Lines that read back a truth value, or a number to count with, of which nothing
    is known."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def notice(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """After a call of a torch function."""
        name = getattr(func, "__name__", "")
        if not (name in _TRUTHS if type(result) is bool else name == "__index__"):
            return
        read = args[0]
        if read.device.type == "phantom" and finiteness.fact_of(read) is None:
            if line := _line():
                self._lines[line] = None

    def note(self) -> str | None:
        if not self._lines:
            return None
        shown = ", ".join([*self._lines][:_MAX_SHOWN])
        more = len(self._lines) - _MAX_SHOWN
        return (
            f"values that nobody computed decide at {shown}"
            f"{f' and {more} more lines' if more > 0 else ''}: they read as False, "
            "numbers as 1, and the figures are those of that way"
        )


def _line() -> str | None:
    """The innermost one of the program or of a library it uses."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        line = Line.of(frame.f_code, frame.f_lasti)
        if line.is_in_program:
            return str(line).rpartition(" ")[0]
    return None
