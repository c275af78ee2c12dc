"""Steps of one system, each phase inside a call of the C library's `lfind`.

Under `callgrind --collect-atstart=no --toggle-collect=lfind --dump-after=lfind`
every phase becomes a profile of its own, in the order forward, backward,
forward, ...: nothing in torch calls `lfind`, and it calls back exactly once.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

from host_models import Training, start

NUM_LAYERS = 8
WARM_UP = 5
NUM_STEPS = 3

COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
LIBC = ctypes.PyDLL(None)  # keeps the GIL, as a plain call would


def inside_lfind(function: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def compare(key: int, element: int) -> int:
        try:
            function()
        except BaseException as error:  # would be printed and dropped by ctypes
            errors.append(error)
        return 0  # found

    one = ctypes.c_int(0)
    length = ctypes.c_size_t(1)
    size = ctypes.c_size_t(ctypes.sizeof(one))
    address = ctypes.byref(one)
    LIBC.lfind(address, address, ctypes.byref(length), size, COMPARE(compare))
    if errors:
        raise errors[0]


def main() -> None:
    start()
    training = Training(sys.argv[1], NUM_LAYERS)
    for _ in range(WARM_UP):
        training.forward()
        training.backward()
        training.finish()
    gc.collect()
    gc.disable()
    for _ in range(NUM_STEPS):
        inside_lfind(training.forward)
        inside_lfind(training.backward)
        training.finish()


if __name__ == "__main__":
    main()
