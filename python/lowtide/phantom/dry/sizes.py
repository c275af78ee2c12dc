"""Sizes that depend on data (``nonzero``, boolean masks, ``unique``, repeats), and
counts.

They are right where the values are known. Otherwise the tokens of a mixture are spread
evenly over its experts: counts are equal (``histc``, ``bincount``), and of what routers
choose every value is chosen equally often (csrc/phantom/observer/balanced_choices.h).
The rest has all elements, or the share that was asked for.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import driver, values
from .untraced import untraced

BALANCED = "counts of choices are equal, as of balanced experts"

_callbacks: list[Any] = []  # alive as long as the observer has them


def install(share: float | None) -> None:
    """For the rest of the process; ``share`` of all elements, None: of balanced choices
    as many as that makes, of the rest all."""
    for name in ("nonzero", "_unique2", "unique_dim", "unique_consecutive"):
        values.replace(name, functools.partial(_sized, name, share))
    values.replace("repeat_interleave.Tensor", functools.partial(_repeated, share))
    values.replace("histc", _histc)
    values.replace("bincount", _bincount)
    torch.cuda._lazy_call(_observe)


def _observe() -> None:
    """From then on the driver forgets what torch writes over."""
    observer = values.observer()
    function = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    _callbacks.append(function(_hear))
    observer.lowtide_dry_hear_assumptions(_callbacks[-1])
    atexit.register(lambda: observer.lowtide_dry_hear_assumptions(function()))
    observer.lowtide_dry_observe()


@untraced
def _hear(what: bytes) -> None:
    values.note(what.decode())


def _ask(name: str, result: Any, tensor: Tensor) -> Any:
    """What the observer knows of the storage; -1 where that is nothing."""
    function = getattr(values.observer(), f"lowtide_dry_{name}")
    function.restype = result
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    storage = tensor.untyped_storage()
    return function(storage.data_ptr(), storage.nbytes())


def _sized(name: str, share: float | None, kernel: Callable[..., Any]) -> Any:
    def sized(keys: Any, tensor: Tensor, *arguments: Any) -> Any:
        if values.is_known(tensor):
            return _computed(name, kernel, keys, tensor, arguments)
        with values.answering(_size(name, tensor, share)):
            return kernel(keys, tensor, *arguments)

    return sized


def _repeated(share: float | None, kernel: Callable[..., Any]) -> Any:
    """Each element is there once, or that share of them."""

    def repeated(keys: Any, counts: Tensor, output_size: int | None = None) -> Tensor:
        if output_size is None and not values.is_known(counts):
            output_size = _size("repeat_interleave", counts, share)
        return kernel(keys, counts, output_size=output_size)

    return repeated


def _size(name: str, tensor: Tensor, share: float | None) -> int:
    count = tensor.numel()
    chosen = -1.0
    if name == "nonzero":
        truth = _ask("uniform_truth", ctypes.c_int, tensor)
        if truth >= 0:
            return count * int(truth)
        chosen = _ask("share", ctypes.c_double, tensor) * count
    elif name == "_unique2":
        chosen = min(count, _ask("choices", ctypes.c_int64, tensor))
    balanced = share is None and chosen >= 0
    if balanced:
        size = round(chosen)
    else:
        size = math.ceil((1.0 if share is None else share) * count)
    if count:
        values.note(
            f"a size that depends on data is {100 * size / count:.3g}% of all elements"
            + (", as choices are balanced" if balanced else "")
        )
    return size


def _computed(
    name: str, kernel: Callable[..., Any], keys: Any, tensor: Tensor, arguments: Any
) -> Any:
    """On the host; the device's results have its values."""
    host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    driver.copy(host.data_ptr(), tensor.data_ptr(), host.untyped_storage().nbytes())
    right = getattr(torch.ops.aten, name).default(host, *arguments)
    first = right if isinstance(right, Tensor) else right[0]
    with values.answering(len(first)):
        found = kernel(keys, tensor, *arguments)
    for to, value in zip(_tensors(found), _tensors(right), strict=True):
        if to.shape == value.shape:
            same = torch.empty_strided(to.size(), to.stride(), dtype=to.dtype)
            same.copy_(value)
            driver.copy(to.data_ptr(), same.data_ptr(), same.nbytes)
    return found


def _tensors(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _histc(kernel: Callable[..., Any]) -> Any:
    def histc(keys: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        return _balanced(tensor, kernel(keys, tensor, *arguments))

    return histc


def _bincount(kernel: Callable[..., Any]) -> Any:
    def bincount(
        keys: Any, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        if values.is_known(tensor):
            return kernel(keys, tensor, weights, minlength)
        with values.answering(max(minlength - 1, 0)):  # the largest number
            counts = kernel(keys, tensor, weights, minlength)
        return counts if weights is not None else _balanced(tensor, counts)

    return bincount


def _balanced(tensor: Tensor, counts: Tensor) -> Tensor:
    if values.is_known(tensor) or not counts.numel():
        return counts
    values.note(BALANCED)
    each, more = divmod(tensor.numel(), counts.numel())
    equal = [each + (place < more) for place in range(counts.numel())]
    on_host = torch.tensor(equal, dtype=counts.dtype)
    driver.copy(counts.data_ptr(), on_host.data_ptr(), on_host.nbytes)
    return counts
