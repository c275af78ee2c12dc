"""What a program reads of values that nobody computed.

Values that the host made are right: the driver keeps them and they travel. Of the rest,
a number that is read back is 1, a truth value False, and a size that depends on data is
the share of all elements that was asked for (``nonzero``, boolean masks, ``unique``).
Counts are equal (``histc``, ``bincount``): the tokens of a mixture are spread evenly over
its experts.
Each place where that happened is a note with its line.
"""

from __future__ import annotations

import ctypes
import math
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
BALANCED = "counts are equal: experts are balanced"

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
_answering = threading.local()
_libraries: list[torch.library.Library] = []


def install(nonzero: float) -> None:
    """For the rest of the process, whose CUDA is the dry driver's."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def replace(name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
        ours = untraced(make(kernel.call_boxed))
        library.impl(name, ours, "CUDA", with_keyset=True)

    torch.cuda._lazy_call(_observe)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        replace("_local_scalar_dense", _read)
        for name in ("nonzero", "_unique2", "unique_dim", "unique_consecutive"):
            replace(name, lambda kernel: _sized(kernel, nonzero))
        replace("histc", _histc)
        replace("bincount", _bincount)
        replace("_amp_foreach_non_finite_check_and_unscale_", _all_finite)


def _observe() -> None:
    """From then on the driver forgets what torch writes over."""
    library = Path(__file__).parents[2] / "liblowtide_dry_observer.so"
    ctypes.CDLL(str(library)).lowtide_dry_observe()


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
def _answer(bits: int) -> Iterator[None]:
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


def _is_known(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    return driver.is_known(storage.data_ptr(), storage.nbytes())


def _what_is_read(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return TRUTH
    return NUMBER if dtype.is_floating_point or dtype.is_complex else COUNT


def _read(kernel: Callable[..., Any]) -> Any:
    def read(keys: Any, tensor: Tensor) -> Any:
        if getattr(_answering, "active", False) or _is_known(tensor):
            return kernel(keys, tensor)
        value = _ONE.get(tensor.dtype, 1)
        notes[_what_is_read(tensor.dtype), where()] += 1
        with _answer(value):
            return kernel(keys, tensor)

    return read


def _sized(kernel: Callable[..., Any], share: float) -> Any:
    def sized(keys: Any, tensor: Tensor, *arguments: Any) -> Any:
        size = math.ceil(share * tensor.numel())
        notes[
            f"a size that depends on data is {share:.0%} of all elements", where()
        ] += 1
        with _answer(size):
            return kernel(keys, tensor, *arguments)

    return sized


def _histc(kernel: Callable[..., Any]) -> Any:
    def histc(keys: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        return _balanced(tensor, kernel(keys, tensor, *arguments))

    return histc


def _bincount(kernel: Callable[..., Any]) -> Any:
    def bincount(
        keys: Any, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        if _is_known(tensor):
            return kernel(keys, tensor, weights, minlength)
        with _answer(max(minlength - 1, 0)):  # the largest number
            counts = kernel(keys, tensor, weights, minlength)
        return counts if weights is not None else _balanced(tensor, counts)

    return bincount


def _balanced(tensor: Tensor, counts: Tensor) -> Tensor:
    if _is_known(tensor) or not counts.numel():
        return counts
    notes[BALANCED, where()] += 1
    each, more = divmod(tensor.numel(), counts.numel())
    equal = [each + (place < more) for place in range(counts.numel())]
    on_host = torch.tensor(equal, dtype=counts.dtype)
    driver.copy(counts.data_ptr(), on_host.data_ptr(), on_host.nbytes)
    return counts


def _all_finite(kernel: Callable[..., Any]) -> Any:
    """GradScaler's: no gradient overflows."""

    def all_finite(keys: Any, tensors: Any, found_inf: Tensor, scale: Tensor) -> None:
        kernel(keys, tensors, found_inf, scale)
        driver.write_zeros(found_inf.data_ptr(), found_inf.nbytes)

    return all_finite
