"""Weights that a forward reads outside of their unit's own.

They are shards there. torch's error, where there is one, names neither the weight nor
what to do, and some reads give a number of one rank's rows. So the first forward of a
root watches who computes with shards. Later ones look for the weight where the error
came from: among the names in the line, innermost first.
"""

import dataclasses
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lowtide._base.classes import class_name
from lowtide._sharding.owners import owner_of
from lowtide._sharding.parameter import UnitParameter
from lowtide._sharding.unit import UnitState

_MIXED = "got mixed torch.Tensor and DTensor"
# A name and what follows it: attributes, places in containers.
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[[^][]+\])*")
_STEP = re.compile(r"\.?(\w+)|\[([^][]+)\]")
_LINES_OF_A_CALL = 4
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def explain_errors(state: UnitState) -> None:
    """Watches the forwards of ``state``'s module, the root, from the one that begins
    on."""
    watch: _Watch | None = _Watch(state)

    def look(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal watch
        if torch.compiler.is_compiling():
            return
        watched, watch = watch, None
        if watched is not None:
            watched.end()
        error = sys.exc_info()[1]
        if error is None:
            if watched is not None:
                watched.require_units_that_ran()
        elif isinstance(error, RuntimeError) and _MIXED in str(error):
            _explain(error, _read_last(watched) or _read_in(error), _tree(state))

    state.modules[0].register_forward_hook(look, always_call=True)


def _tree(root: UnitState) -> list[UnitState]:
    return [unit for reference in root.tree if (unit := reference())]


@dataclasses.dataclass(frozen=True)
class _Read:
    """A read of a sharded parameter, somewhere in a program."""

    owner: UnitParameter
    file: str
    function: str
    line: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{code!r} in {self.function} (line {self.line} of {self.file})"


def _explain(error: RuntimeError, read: _Read | None, units: list[UnitState]) -> None:
    unit = next((u for u in units if read and read.owner in u.parameters), None)
    if read is None or unit is None:
        return
    said = str(error).splitlines()[0]
    error.args = (
        f"lowtide: parameter '{read.owner.name}': expected to be read in a forward of "
        f"its unit '{unit.name}', which gathers it, got {read}, where it is a shard. "
        f"Call the unit's module itself, or {unit.instead}. (torch: {said})",
    )


# -- who computes with shards, in the first forward ----------------------------------

_reads: list[_Read] = []

# What asks about a tensor instead of computing with it.
_QUESTIONS = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset")
    + ("element_size", "get_device", "is_contiguous", "is_floating_point", "is_complex")
    + ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "type")
    + ("retain_grad", "detach", "data_ptr", "untyped_storage", "__repr__", "__len__")
    + ("is_same_size", "is_shared", "__hash__", "__format__", "__deepcopy__")
)
_TRANSPOSED = frozenset(("T", "mT", "H", "mH"))


class _WatchedShard(DTensor):
    """What a shard is during the first forward of its root: it notes who reads it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _computes(func):
            for value in tree_leaves((args, kwargs)):
                if type(value) is _WatchedShard:
                    _note(value)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _computes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") in _TRANSPOSED
    return name not in _QUESTIONS


def _note(shard: Any) -> None:
    owner = owner_of(shard)
    if owner is None:
        return
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is not None:
        code = frame.f_code
        _reads.append(_Read(owner, code.co_filename, code.co_name, frame.f_lineno))


def _read_last(watch: "_Watch | None") -> _Read | None:
    return watch.reads[-1] if watch is not None and watch.reads else None


class _Watch:
    """Watches the shards of every unit below ``root``."""

    def __init__(self, root: UnitState) -> None:
        self._root = root
        self.reads: list[_Read] = []
        self._shards: list[Any] = []
        _reads.clear()
        for unit in _tree(root):
            shards: list[Any] = [parameter.shard for parameter in unit.parameters]
            for shard in shards:
                if unit.first is not root and type(shard) is DTensor:
                    shard.__class__ = _WatchedShard
                    self._shards.append(shard)

    def end(self) -> None:
        for shard in self._shards:
            shard.__class__ = DTensor
        self._shards = []
        self.reads, _reads[:] = list(_reads), []

    def require_units_that_ran(self) -> None:
        """Nobody has computed with a weight whose module was never called, of those
        that `wrap` has chosen; whoever shards one by hand may mean its shards."""
        root = self._root.root
        ran = set(root.entered_units if root is not None else ())
        for number, unit in enumerate(_tree(self._root)):
            if number in ran or not unit.chosen_by_wrap:
                continue
            for read in self.reads:
                if read.owner in unit.parameters:
                    raise RuntimeError(
                        f"lowtide: parameter '{read.owner.name}': expected the forward "
                        f"of its unit '{unit.name}' to run where it is read, got {read}"
                        f", where it is a shard, and no call of that module in a "
                        f"forward of '{class_name(self._root.modules[0])}'. Call it, "
                        f"or {unit.instead}."
                    )


# -- where an error came from, in later forwards -------------------------------------


def _read_in(error: BaseException) -> _Read | None:
    for frame, line in _frames(error):
        for owner in _weights(frame, line):
            code = frame.f_code
            return _Read(owner, code.co_filename, code.co_name, line)
    return None


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def _weights(frame: FrameType, line: int) -> Iterator[UnitParameter]:
    """Sharded parameters that the code from ``line`` on names."""
    for number in range(line, line + _LINES_OF_A_CALL):
        code = linecache.getline(frame.f_code.co_filename, number)
        for path in _PATH.findall(code):
            value = _value(frame.f_locals, path)
            if isinstance(value, nn.Parameter):
                owner = owner_of(value)
                if owner is not None and owner.shard is value:
                    yield owner


def _value(names: dict[str, Any], path: str) -> Any:
    """Follows what modules have registered: nothing of the program's is called."""
    first, *steps = _STEP.finditer(path)
    value = names.get(first[1])
    for step in steps:
        if isinstance(value, nn.Parameter):
            break  # "weight.t"
        if not isinstance(value, nn.Module):
            return None
        name = step[1] or _place(value, step[2].strip(), names)
        value = value._parameters.get(name, value._modules.get(name))
    return value


def _place(container: nn.Module, index: str, names: dict[str, Any]) -> str:
    """The name that a container's element is registered under."""
    place = names.get(index, index.strip("'\""))
    try:
        number = int(place)
    except (TypeError, ValueError):
        return str(place)
    count = len(container._modules) or len(container._parameters)
    return str(number + count if number < 0 else number)
