"""Trace files: what a program asked of the caching allocator, to be asked again.

A file has one JSON object a line. The first says what it is, and the keywords of the
:class:`~lowtide.phantom.AllocatorModel` that behaves like the allocator it came from::

    {"trace": "lowtide.phantom.allocator", "version": 1, "settings": {...}}

Each further line is one operation:

    {"op": "allocate", "id": 7, "bytes": 4096, "stream": 0}
    {"op": "record", "id": 7, "stream": 3}      stream 3 uses allocation 7 too
    {"op": "free", "id": 7}
    {"op": "synchronize", "stream": 3}          the host waited; without a stream,
                                                for the whole device
    {"op": "empty_cache"}

An ``id`` belongs to one allocation for the whole file; streams are any integers. An
allocation that failed has ``"fails": true``. ``"reserved"``, where it is there, is what
was observed right after the operation, in bytes: :func:`replay` compares with it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lowtide.phantom.allocator import AllocatorModel

OpName = Literal["allocate", "record", "free", "synchronize", "empty_cache"]

_HEADER = {"trace": "lowtide.phantom.allocator", "version": 1}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a trace file."""

    op: OpName
    id: int | None = None
    bytes: int | None = None
    stream: int | None = None
    fails: bool = False
    reserved: int | None = None  # observed after it


@dataclasses.dataclass(frozen=True)
class Trace:
    operations: Sequence[Operation]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, path: str | Path) -> None:
        with open(path, "w") as file:
            for line in (_HEADER | {"settings": self.settings}, *self._lines()):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        for operation in self.operations:
            fields = vars(operation).items()
            yield {k: v for k, v in fields if v is not None and v is not False}

    @classmethod
    def read(cls, path: str | Path) -> "Trace":
        """Raises ValueError if the file is not a trace of this version."""
        with open(path) as file:
            first = file.readline()
            try:
                header = json.loads(first)
                known = {k: header[k] for k in _HEADER} == _HEADER
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise ValueError(
                    f"lowtide: {path}: expected a line with {json.dumps(_HEADER)}, got "
                    f"{first[:80]!r}. Write the file with lowtide.phantom.traces."
                )
            operations = [Operation(**json.loads(line)) for line in file]
        return cls(operations, header["settings"])


@dataclasses.dataclass(frozen=True)
class Difference:
    """An operation after which the model has reserved something else."""

    index: int
    operation: Operation
    reserved: int  # by the model, bytes


@dataclasses.dataclass(frozen=True)
class Replay:
    model: AllocatorModel
    allocated: list[int]  # bytes after each operation
    reserved: list[int]
    differences: list[Difference]


def replay(trace: Trace, model: AllocatorModel | None = None) -> Replay:
    """Asks ``model`` (by default a new one with the trace's settings) the same.

    An allocation that failed is asked for only if the model has a capacity. Raises
    torch.OutOfMemoryError where the model has no memory and the trace's program had.
    """
    model = model or AllocatorModel(**trace.settings)
    handles: dict[int | None, int] = {}
    result = Replay(model, [], [], [])
    for index, operation in enumerate(trace.operations):
        _apply(operation, model, handles)
        reserved = model.reserved
        result.allocated.append(model.allocated)
        result.reserved.append(reserved)
        if operation.reserved not in (None, reserved):
            result.differences.append(Difference(index, operation, reserved))
    return result


def reserved_bounds(trace: Trace) -> tuple[int, int]:
    """The least and the most that the program may have had reserved at its peak, in
    bytes: with a device that is never behind, and one that is behind until the host
    waits. The rest of the settings are the trace's."""
    least, most = (
        max(replay(trace, AllocatorModel(**settings)).reserved, default=0)
        for settings in (
            {**trace.settings, "events": "immediate"},
            {**trace.settings, "events": "at_sync"},
        )
    )
    return least, most


def _apply(
    operation: Operation, model: AllocatorModel, handles: dict[int | None, int]
) -> None:
    if operation.op == "allocate":
        assert operation.bytes is not None and operation.stream is not None
        if not operation.fails:
            handles[operation.id] = model.malloc(operation.bytes, operation.stream)
        elif model.settings()["capacity"] is not None:
            _try_to_allocate(model, operation.bytes, operation.stream)
    elif operation.op == "free":
        model.free(handles.pop(operation.id))
    elif operation.op == "record":
        assert operation.stream is not None
        model.record_stream(handles[operation.id], operation.stream)
    elif operation.op == "synchronize":
        model.synchronize(operation.stream)
    else:
        model.empty_cache()


def _try_to_allocate(model: AllocatorModel, nbytes: int, stream: int) -> None:
    """Failing flushes the cache, which is part of the trace."""
    try:
        model.free(model.malloc(nbytes, stream))
    except torch.OutOfMemoryError:
        pass
