"""What lowtide's operators on lists launch and allocate on CUDA, over the dry driver.

    python list_operators_dry_run.py    prints {operator: [launches, bytes, peak bytes]}

Bytes: allocated when it returned, and at most meanwhile, beyond what was before.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable

import torch
from torch import nn

import lowtide

ops = torch.ops.lowtide


def measure(action: Callable[[], object]) -> list[int]:
    launches = ctypes.CDLL(None).lowtide_dry_launches
    launches.restype = ctypes.c_int64
    torch.cuda.reset_peak_memory_stats()
    memory, number = torch.cuda.memory_allocated(), launches()
    kept = action()
    now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del kept
    return [launches() - number, now - memory, peak - memory]


def tensors(count: int, dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
    return [torch.empty(sizes, dtype=dtype, device="cuda") for _ in range(count)]


def clip(parameters: list[nn.Parameter], settings: dict[str, object]) -> None:
    lowtide.clip_grad_norm_(parameters, 1.0, **settings)  # type: ignore[arg-type]


def main() -> None:
    half, single = torch.bfloat16, torch.float32
    small, smaller = tensors(48, single, 100), tensors(48, half, 100)
    two = tensors(2, single, 300, 1000)
    matrix = torch.empty(8, 1024, device="cuda")[:, 64:]
    gradient = torch.empty(8 * 960, dtype=half, device="cuda").view(8, 960)
    factor = torch.empty((), device="cuda")
    table, rows = two[0], tensors(1, half, 77, 1000)[0]
    index = torch.empty(77, dtype=torch.int64, device="cuda")
    parameters = [nn.Parameter(t) for t in tensors(48, single, 4096)]
    for p in parameters:
        p.grad = torch.empty_like(p)
    found = {
        "copy 48": measure(lambda: ops.foreach_copy_(small, smaller)),
        "copy 48 and 2": measure(
            lambda: ops.foreach_copy_(small + two, smaller + tensors(0, half) + two)
        ),
        "copy of two types": measure(
            lambda: ops.foreach_copy_([small[0], smaller[0]], [smaller[1], small[1]])
        ),
        "copy into a chunk": measure(lambda: ops.foreach_copy_([matrix], [gradient])),
        "add": measure(lambda: ops.foreach_add_(small, smaller)),
        "norm": measure(lambda: ops.foreach_l2_norm(small)),
        "scale": measure(lambda: ops.foreach_scale_(small, factor)),
        "rows": measure(lambda: ops.add_rows_(table, index, rows)),
        "clip": measure(lambda: clip(parameters, {})),
        "clip as torch": measure(lambda: clip(parameters, {"foreach": False})),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
