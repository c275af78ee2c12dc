"""What a program reads of values that nobody computed.

Values that the host made are right: the driver keeps them and they travel. Of the rest,
a number that is read back is 1 and a truth value False; :mod:`.sizes` has what depends
on data. Each place where that happened is a note with its line.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from . import driver
from .untraced import untraced

TRUTH = "a truth value read back is False"
COUNT = "a whole number read back is 1"
NUMBER = "a number read back is 1"

# {(what was assumed, where): how often}
notes: Counter[tuple[str, str]] = Counter()

_ONE = {
    torch.float64: 0x3FF0000000000000,
    torch.float32: 0x3F800000,
    torch.float16: 0x3C00,
    torch.bfloat16: 0x3F80,
    torch.complex64: 0x3F800000,
    torch.bool: 0,
}
_OWN = tuple(
    str(folder) + os.sep
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
_PRINTER = torch._tensor_str.__file__
_answering = threading.local()
_libraries: list[torch.library.Library] = []


def install() -> None:
    """For the rest of the process, whose CUDA is the dry driver's."""
    replace("_local_scalar_dense", _read)
    replace("_amp_foreach_non_finite_check_and_unscale_", _all_finite)


def replace(name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """The operator's kernel for CUDA by what ``make`` makes of it."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
    made = untraced(make(kernel.call_boxed))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, made, "CUDA", with_keyset=True)


def observer() -> ctypes.CDLL:
    """The library that tells the driver what torch does with memory."""
    library = Path(__file__).parents[2] / "liblowtide_dry_observer.so"
    return ctypes.CDLL(str(library))


def note(what: str) -> None:
    """``what`` was assumed here, and not inside of what is answered already."""
    if getattr(_answering, "active", False):
        return
    frame = sys._getframe(1)
    notes[NUMBER if _is_printing(frame) else what, where()] += 1


def _is_printing(frame: FrameType | None) -> bool:
    """What only goes into a tensor's text decides nothing."""
    while frame:
        if frame.f_code.co_filename == _PRINTER:
            return True
        frame = frame.f_back
    return False


def where() -> str:
    """The line of the program, or of a library of others, that runs; of a thread of
    autograd the node."""
    node = torch._C._current_autograd_node()
    otherwise = "a thread of its own" if node is None else str(node.name())
    return line_of(sys._getframe(1)) or otherwise


def line_of(frame: FrameType | None) -> str:
    """The innermost one that is neither torch's nor lowtide's; empty if all are."""
    while frame and frame.f_code.co_filename.startswith((*_OWN, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


@contextmanager
def answering(bits: int) -> Iterator[None]:
    if getattr(_answering, "active", False):  # the outer one stands
        yield
        return
    _answering.active = True
    driver.answer(bits)
    try:
        yield
    finally:
        driver.no_answer()
        _answering.active = False


def is_known(tensor: Tensor) -> bool:
    """Whether the host made it, or it follows from what the host made."""
    storage = tensor.untyped_storage()
    return driver.is_known(storage.data_ptr(), storage.nbytes()) or (
        tensor.is_contiguous() and driver.is_known(tensor.data_ptr(), tensor.nbytes)
    )


def _what_is_read(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return TRUTH
    return NUMBER if dtype.is_floating_point or dtype.is_complex else COUNT


def _read(kernel: Callable[..., Any]) -> Any:
    def read(keys: Any, tensor: Tensor) -> Any:
        if getattr(_answering, "active", False) or is_known(tensor):
            return kernel(keys, tensor)
        value = _ONE.get(tensor.dtype, 1)
        note(_what_is_read(tensor.dtype))
        with answering(value):
            return kernel(keys, tensor)

    return read


def _all_finite(kernel: Callable[..., Any]) -> Any:
    """GradScaler's: no gradient overflows."""

    def all_finite(keys: Any, tensors: Any, found_inf: Tensor, scale: Tensor) -> None:
        kernel(keys, tensors, found_inf, scale)
        driver.write_zeros(found_inf.data_ptr(), found_inf.nbytes)

    return all_finite
