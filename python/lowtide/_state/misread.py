"""Weights that a forward reads outside of their unit's own.

They are shards there, and torch's error names neither the weight nor what to do. By the
time it is raised torch knows no more, so the weight is looked for where the error came
from: among the names in the line, innermost first.
"""

import linecache
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._state.ties import owner_of

if TYPE_CHECKING:
    from lowtide._state.parameter import UnitParameter
    from lowtide._state.unit import UnitState

_MIXED = "got mixed torch.Tensor and DTensor"
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_LINES_OF_A_CALL = 4


def explain_errors(state: "UnitState") -> None:
    """Of the forward of ``state``'s module, the root."""

    def explain(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        error = sys.exc_info()[1]
        if isinstance(error, RuntimeError) and _MIXED in str(error):
            _explain(error, [unit for ref in state.tree if (unit := ref())])

    state.modules[0].register_forward_hook(explain, always_call=True)


def _explain(error: RuntimeError, units: "list[UnitState]") -> None:
    said = str(error).splitlines()[0]
    for frame, line in _frames(error):
        code = linecache.getline(frame.f_code.co_filename, line).strip()
        for owner in _weights(frame, line):
            unit = next((unit for unit in units if owner in unit.parameters), None)
            if unit is None:
                continue
            error.args = (
                f"lowtide: parameter '{owner.name}': expected to be read in a forward "
                f"of its unit '{unit.name}', which gathers it, got {code!r} in "
                f"{frame.f_code.co_name} (line {line} of "
                f"{frame.f_code.co_filename}), where it is a shard. Call the unit's "
                f"module itself, or {unit.instead}. (torch: {said})",
            )
            return


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def _weights(frame: FrameType, line: int) -> "Iterator[UnitParameter]":
    """Sharded parameters that the code from ``line`` on names."""
    for number in range(line, line + _LINES_OF_A_CALL):
        code = linecache.getline(frame.f_code.co_filename, number)
        for name in _DOTTED.findall(code):
            value = _value(frame.f_locals, name.split("."))
            if isinstance(value, nn.Parameter):
                owner = owner_of(value)
                if owner is not None and owner.shard is value:
                    yield owner


def _value(names: dict[str, Any], path: list[str]) -> Any:
    """Follows what modules have registered: nothing of the program's is called."""
    value = names.get(path[0])
    for name in path[1:]:
        if isinstance(value, nn.Parameter):
            break  # "weight.t"
        if not isinstance(value, nn.Module):
            return None
        value = value._parameters.get(name, value._modules.get(name))
    return value
