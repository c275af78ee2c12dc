"""What the dry driver tells of itself; see csrc/phantom/driver/report.cpp."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple


@cache
def _function(name: str, result: Any) -> Any:
    function = getattr(ctypes.CDLL(None), f"lowtide_dry_{name}")
    function.restype = result
    return function


def call(name: str, *arguments: Any, result: Any = None) -> Any:
    """``lowtide_dry_NAME``. Whole numbers go as 64 bits, of which C's ``int`` is the
    lower half and a pointer all."""
    wide = {bool: ctypes.c_int64, int: ctypes.c_int64, float: ctypes.c_double}
    given = (wide[type(a)](a) if type(a) in wide else a for a in arguments)
    return _function(name, result)(*given)


def number(name: str, *arguments: Any) -> int:
    """Of one that returns 64 bits."""
    return int(call(name, *arguments, result=ctypes.c_int64))


def _lines(name: str) -> list[str]:
    text: bytes = call(name, result=ctypes.c_char_p)
    return text.decode().splitlines()


def launches() -> int:
    """Kernels so far."""
    return number("launches")


def host_waits() -> int:
    """How often the host has waited for a device."""
    return number("host_waits")


def peak_pinned() -> int:
    """Bytes of page-locked host memory, at most so far."""
    return number("peak_pinned")


def peak_memory(device: int) -> int:
    """Bytes of a device that were not free, at most so far."""
    return number("peak_memory", device)


def set_bounds(device: int, limit: int, immediate: bool) -> None:
    """Before it is used: its bytes; whether events are complete when recorded."""
    call("set_bounds", device, limit, immediate)


def settle() -> None:
    """Whatever the current device was told counts as waited for; no time passes."""
    call("settle")


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
    return number("num_calls")


_heard: list[Any] = []  # alive as long as the driver has them


def hear_calls(hear: Callable[[int], None]) -> None:
    """``hear`` is told the number of each call on the thread that makes it, until the
    interpreter ends."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64)
    _heard.append(function(hear))
    call("hear_calls", _heard[-1])
    atexit.register(lambda: call("hear_calls", function()))


def name_group(unique_id: bytes, name: str, ranks: Sequence[int]) -> None:
    """Communicators that are made from ``unique_id`` are of that group of the
    world's ranks."""
    call("name_group", unique_id, name.encode(), *_array(ranks))


def name_split(name: str, ranks: Sequence[int]) -> None:
    """The next communicator that this thread splits off another is."""
    call("name_split", name.encode(), *_array(ranks))


def _array(numbers: Sequence[int]) -> tuple[Any, int]:
    return (ctypes.c_int64 * len(numbers))(*numbers), len(numbers)


def missing() -> list[str]:
    """Functions that were called and that the driver lacks."""
    return _lines("missing_names")


def is_known(address: int, num_bytes: int) -> bool:
    """Whether the host made all of these bytes."""
    return bool(call("known", address, num_bytes, result=ctypes.c_int))


def write_zeros(address: int, num_bytes: int) -> None:
    """Writes zeros as if the host had made them."""
    call("write_zeros", address, num_bytes)


def copy(to: int, source: int, num_bytes: int) -> None:
    """Between host and device, as if the host had done it."""
    call("copy", to, source, num_bytes)


def device_of(address: int) -> int:
    """-1 for the host's."""
    return int(call("device_of", address, result=ctypes.c_int))


def answer(bits: int) -> None:
    """What this thread's reads of up to 8 bytes yield, until :func:`no_answer`."""
    call("answer", bits)


def no_answer() -> None:
    call("no_answer")
