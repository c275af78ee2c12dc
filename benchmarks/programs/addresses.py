"""Where cudaMalloc puts what it is asked for, as JSON: [[bytes, address], ...], of a
fixed sequence of calls, addresses beside the first one's.

torch's allocator takes, of free blocks of one size, that of the lowest address, so
layouts follow from it.
"""

from __future__ import annotations

import ctypes
import json

import torch

MIB = 1 << 20
# Sizes in MiB; a negative one frees the oldest of that size.
CALLS = (
    *(2, 2, 20, 2, 20, 22, 100, 2, 2, 1002, 20, 64, 2, 34, 500, 2),
    *(-20, -2, 20, 2, -100, 64, 36, 100, -1002, 500, 502, 20, 2, -22, 22),
    *([2] * 20 + [20] * 6 + [130, 258, 514, 1026, 16, 8, 4, 6]),
)


def main() -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    runtime = ctypes.CDLL(None)
    held: list[tuple[int, int]] = []
    found = []
    for size in CALLS:
        if size < 0:
            at = next(i for i, (of, _) in enumerate(held) if of == -size)
            address = held.pop(at)[1]
            assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
            found.append((size, address))
            continue
        pointer = ctypes.c_void_p()
        call = (ctypes.byref(pointer), ctypes.c_size_t(size * MIB))
        assert runtime.cudaMalloc(*call) == 0
        held.append((size, pointer.value or 0))
        found.append((size, pointer.value or 0))
    print(json.dumps([(size, (at - found[0][1]) / MIB) for size, at in found]))


if __name__ == "__main__":
    main()
