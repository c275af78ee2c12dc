"""The dry driver's clock; see csrc/phantom/driver/report_time.cpp."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

KINDS = ("kernel", "transfer", "collective", "wait")  # csrc/phantom/time/span.h


class Span(NamedTuple):
    """One thing a stream does. Seconds since the timeline began."""

    kind: str  # kernel, transfer, collective; wait: idle until another stream is done
    stream: int
    begin: float
    end: float
    issued: float  # when the host did
    name: str
    flops: float
    bytes: float


class _Span(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("begin", "end", "issued")),
        *((name, ctypes.c_double) for name in ("flops", "bytes")),
        ("name", ctypes.c_char_p),
    ]


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None), f"lowtide_dry_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


def is_here() -> bool:
    """Whether CUDA is the dry driver's in this process."""
    return hasattr(ctypes.CDLL(None), "lowtide_dry_keeps_time")


def runs() -> bool:
    return bool(_function("keeps_time", ctypes.c_int)())


def start(figures: Sequence[float]) -> bool:
    """``figures`` as :func:`lowtide.phantom.machines.flat` has them. False while
    another timeline runs."""
    numbers = (ctypes.c_double * len(figures))(*figures)
    function = _function(
        *("start_time", ctypes.c_int, ctypes.POINTER(ctypes.c_double), ctypes.c_size_t)
    )
    return bool(function(numbers, len(figures)))


def stop() -> None:
    _function("stop_time", None)()


def mark(phase: str) -> None:
    _function("mark_phase", None, ctypes.c_char_p)(phase.encode())


def moment() -> int:
    """The moment when what was issued on the compute stream so far is done, for
    :func:`time_of`."""
    return int(_function("record_moment", ctypes.c_int64)())


def time_of(moment: int) -> float:
    """Seconds. While the timeline runs, what was issued so far is simulated for it."""
    return float(_function("time_of", ctypes.c_double, ctypes.c_int64)(moment))


def enter(name: str) -> None:
    """This thread launches kernels of ``name`` until :func:`leave`."""
    _function("enter_operator", None, ctypes.c_char_p)(name.encode())


def leave(flops: float, bytes: float, rate: int = 1) -> None:
    """What they did; ``rate``: of csrc/phantom/time/machine.h."""
    double, integer = ctypes.c_double, ctypes.c_int
    function = _function("leave_operator", None, double, double, integer, integer)
    function(flops, bytes, rate, 0)


def spans() -> list[Span]:
    """What the timeline that ended last has seen."""
    first = ctypes.POINTER(_Span)()
    function = _function(
        "read_spans", ctypes.c_int64, ctypes.POINTER(ctypes.POINTER(_Span))
    )
    count = function(ctypes.byref(first))
    return [
        Span(
            *(KINDS[s.kind], s.stream, s.begin, s.end, s.issued),
            *((s.name or b"").decode(), s.flops, s.bytes),
        )
        for s in first[:count]
    ]


def phases() -> list[tuple[str, float]]:
    """Names and when they began."""
    begins = ctypes.POINTER(ctypes.c_double)()
    names = ctypes.POINTER(ctypes.c_char)()
    function = _function(
        "read_phases", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
    )
    count = function(ctypes.byref(begins), ctypes.byref(names))
    found, place = [], 0
    for number in range(count):
        name = ctypes.string_at(ctypes.addressof(names.contents) + place)
        place += len(name) + 1
        found.append((name.decode(), begins[number]))
    return found


def usage(begin: float, end: float, compute: int = 0) -> list[float]:
    """The figures of csrc/phantom/time/exposure.h."""
    figures = array("d", bytes(8 * 7))
    address, _ = figures.buffer_info()
    double = ctypes.c_double
    function = _function("usage", None, double, double, ctypes.c_int64, ctypes.c_void_p)
    function(begin, end, compute, address)
    return list(figures)
