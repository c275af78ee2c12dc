"""The dry driver's clock; see csrc/phantom/driver/report_time.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from .driver import call, number

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


def is_here() -> bool:
    """Whether CUDA is the dry driver's in this process."""
    return hasattr(ctypes.CDLL(None), "lowtide_dry_keeps_time")


def runs() -> bool:
    return bool(call("keeps_time", result=ctypes.c_int))


def start(figures: Sequence[float]) -> bool:
    """``figures`` as :func:`lowtide.phantom.machines.flat` has them. False while
    another timeline runs."""
    numbers = (ctypes.c_double * len(figures))(*figures)
    return bool(call("start_time", numbers, len(figures), result=ctypes.c_int))


def stop() -> None:
    call("stop_time")


def mark(phase: str) -> None:
    call("mark_phase", phase.encode())


def moment() -> int:
    """The moment when what was issued on the compute stream so far is done, for
    :func:`time_of`."""
    return number("record_moment")


def time_of(moment: int) -> float:
    """Seconds. While the timeline runs, what was issued so far is simulated for it."""
    return float(call("time_of", moment, result=ctypes.c_double))


def enter(name: str) -> None:
    """This thread launches kernels of ``name`` until :func:`leave`."""
    call("enter_operator", name.encode())


def leave(flops: float, bytes: float, rate: int = 1) -> None:
    """What they did; ``rate``: of csrc/phantom/time/machine.h."""
    call("leave_operator", float(flops), float(bytes), rate, 0)


def spans() -> list[Span]:
    """What the timeline that ended last has seen."""
    first = ctypes.POINTER(_Span)()
    count = number("read_spans", ctypes.byref(first))
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
    count = number("read_phases", ctypes.byref(begins), ctypes.byref(names))
    found, place = [], 0
    for phase in range(count):
        name = ctypes.string_at(ctypes.addressof(names.contents) + place)
        place += len(name) + 1
        found.append((name.decode(), begins[phase]))
    return found


def usage(begin: float, end: float, compute: int = 0) -> list[float]:
    """The figures of csrc/phantom/time/exposure.h."""
    figures = (ctypes.c_double * 7)()
    call("usage", float(begin), float(end), compute, figures)
    return list(figures)
