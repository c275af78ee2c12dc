"""``LOWTIDE_DEBUG=1``: what is checked at a price (docs/debugging.md).

Bytes are filled with NaN when they are leased and before they go back. What a
checkpointed region stores is compared, bit for bit, when it is used: writes through
``.data`` and by kernels that torch does not know change no version counter.
"""

import ctypes
import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide import _C

_VARIABLE = "LOWTIDE_DEBUG"


@functools.cache
def enabled() -> bool:
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"lowtide: {_VARIABLE}: expected 0 or 1, got {value!r}. Unset it for 0."
        )
    if value == "1":
        require_values(_VARIABLE)
    return value == "1"


def require_values(variable: str) -> None:
    """Raises ValueError over the dry driver, under which tensors have no bits."""
    if hasattr(ctypes.CDLL(None), "lowtide_dry_launches"):
        raise ValueError(
            f"lowtide: {variable}: expected a device that computes, got the dry "
            "driver, under which there are no values to compare. Unset it for "
            "`lowtide plan` and `lowtide phantom`."
        )


def digest(tensor: Tensor) -> str:
    """Of its sizes, dtype and bits, which are copied to the host; of a DTensor, of its
    rows on this rank. Sizes and dtype of what has no bits of its own."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    if not plain or tensor.is_meta:
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    return f"{_C.digest(tensor.detach()) & (2**64 - 1):016x}"


class Stored:
    """Tensors as they are now."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._digests = [digest(t) if isinstance(t, Tensor) else "" for t in tensors]

    def require_same(self, tensors: Iterable[Any], who: str, what: str) -> None:
        """Raises RuntimeError where they are not."""
        now = Stored(tensors)._digests
        for place, (seen, found) in enumerate(zip(self._digests, now, strict=True)):
            if seen != found:
                raise RuntimeError(
                    f"lowtide: {who}: expected {what} {place} as its forward had it, "
                    f"got other bits ({seen} then, {found} now), which no version "
                    "counter told: a write through .data, or by a kernel that torch "
                    "does not know. Write to a clone()."
                )
