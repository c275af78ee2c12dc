"""What the dry driver tells of itself; see csrc/phantom/driver/report.cpp."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None), f"lowtide_dry_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


def _number(name: str) -> int:
    return int(_function(name, ctypes.c_int64)())


def _lines(name: str) -> list[str]:
    text: bytes = _function(name, ctypes.c_char_p)()
    return text.decode().splitlines()


def launches() -> int:
    """Kernels so far."""
    return _number("launches")


def host_waits() -> int:
    """How often the host has waited for a device."""
    return _number("host_waits")


def peak_pinned() -> int:
    """Bytes of page-locked host memory, at most so far."""
    return _number("peak_pinned")


def peak_memory(device: int) -> int:
    """Bytes of a device that were not free, at most so far."""
    return int(_function("peak_memory", ctypes.c_int64, ctypes.c_int)(device))


def set_bounds(device: int, limit: int, immediate: bool) -> None:
    """Before it is used: its bytes; whether events are complete when recorded."""
    arguments = (ctypes.c_int, ctypes.c_int64, ctypes.c_int)
    _function("set_bounds", None, *arguments)(device, limit, immediate)


class Communicator(NamedTuple):
    """One of NCCL's; ``ranks`` are those of the world, by rank in the group. ``name``
    is that of the group, and empty where nobody named it."""

    number: int
    rank: int
    size: int
    ranks: tuple[int, ...]
    name: str


def communicators() -> list[Communicator]:
    """In the order in which they were made."""
    found = []
    for line in _lines("communicators"):
        number, rank, size, ranks, name = line.split("\t")
        numbers = tuple(int(each) for each in ranks.split(","))
        found.append(Communicator(int(number), int(rank), int(size), numbers, name))
    return found


class Call(NamedTuple):
    """One call of NCCL (csrc/phantom/driver/collective_log.h)."""

    kind: str
    bytes: int
    type: str
    reduction: str
    peer: int
    communicator: int
    stream: int
    priority: int
    most_ctas: int
    depth: int
    group: int


def calls() -> list[Call]:
    """In the order in which they were made."""
    found = []
    for line in _lines("calls"):
        kind, num_bytes, dtype, reduction, *numbers = line.split("\t")
        found.append(Call(kind, int(num_bytes), dtype, reduction, *map(int, numbers)))
    return found


def num_calls() -> int:
    """So far."""
    return _number("num_calls")


_heard: list[Any] = []  # alive as long as the driver has them


def hear_calls(hear: Callable[[int], None]) -> None:
    """``hear`` is told the number of each call on the thread that makes it, until the
    interpreter ends."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64)
    tell = _function("hear_calls", None, function)
    _heard.append(function(hear))
    tell(_heard[-1])
    atexit.register(lambda: tell(function()))


def name_group(unique_id: bytes, name: str, ranks: Sequence[int]) -> None:
    """Communicators that are made from ``unique_id`` are of that group of the
    world's ranks."""
    numbers = ctypes.c_int64 * len(ranks)
    arguments = (ctypes.c_char_p, ctypes.c_char_p, numbers, ctypes.c_int64)
    function = _function("name_group", None, *arguments)
    function(unique_id, name.encode(), numbers(*ranks), len(ranks))


def name_split(name: str, ranks: Sequence[int]) -> None:
    """The next communicator that this thread splits off another is."""
    numbers = ctypes.c_int64 * len(ranks)
    function = _function("name_split", None, ctypes.c_char_p, numbers, ctypes.c_int64)
    function(name.encode(), numbers(*ranks), len(ranks))


def missing() -> list[str]:
    """Functions that were called and that the driver lacks."""
    return _lines("missing_names")


def is_known(address: int, num_bytes: int) -> bool:
    """Whether the host made all of these bytes."""
    arguments = (ctypes.c_void_p, ctypes.c_int64)
    return bool(_function("known", ctypes.c_int, *arguments)(address, num_bytes))


def write_zeros(address: int, num_bytes: int) -> None:
    """Writes zeros as if the host had made them."""
    arguments = (ctypes.c_void_p, ctypes.c_int64)
    _function("write_zeros", None, *arguments)(address, num_bytes)


def copy(to: int, source: int, num_bytes: int) -> None:
    """Between host and device, as if the host had done it."""
    arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    _function("copy", None, *arguments)(to, source, num_bytes)


def device_of(address: int) -> int:
    """-1 for the host's."""
    return int(_function("device_of", ctypes.c_int, ctypes.c_void_p)(address))


def answer(bits: int) -> None:
    """What this thread's reads of up to 8 bytes yield, until :func:`no_answer`."""
    _function("answer", None, ctypes.c_int64)(bits)


def no_answer() -> None:
    _function("no_answer", None)()
