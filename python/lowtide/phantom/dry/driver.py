"""What the dry driver tells of itself; see csrc/phantom/driver/report.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None), f"lowtide_dry_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


def _number(name: str) -> int:
    return int(_function(name, ctypes.c_int64)())


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


def collectives() -> list[str]:
    """A line each (csrc/phantom/driver/collective_log.h)."""
    return _function("collectives", ctypes.c_char_p)().decode().splitlines()


def missing() -> list[str]:
    """Functions that were called and that the driver lacks."""
    return _function("missing_names", ctypes.c_char_p)().decode().splitlines()


def is_known(address: int, num_bytes: int) -> bool:
    """Whether the host made all of these bytes."""
    arguments = (ctypes.c_void_p, ctypes.c_int64)
    return bool(_function("known", ctypes.c_int, *arguments)(address, num_bytes))


def write_zeros(address: int, num_bytes: int) -> None:
    """As if the host had made them."""
    arguments = (ctypes.c_void_p, ctypes.c_int64)
    _function("write_zeros", None, *arguments)(address, num_bytes)


def device_of(address: int) -> int:
    """-1 for the host's."""
    return int(_function("device_of", ctypes.c_int, ctypes.c_void_p)(address))


def answer(bits: int) -> None:
    """What this thread's reads of up to 8 bytes yield, until :func:`no_answer`."""
    _function("answer", None, ctypes.c_int64)(bits)


def no_answer() -> None:
    _function("no_answer", None)()
