"""Bandwidth of lowtide's operators on lists of tensors beside that of a copy, as JSON:
bytes read and written by seconds, GB/s.

    kernels.py NUM_ELEMENTS ROUNDS

The lists have the shapes of a transformer block: seven matrices and two vectors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median

import torch
from timing import in_turns

import lowtide  # noqa: F401  registers the operators

ops = torch.ops.lowtide
WIDTH = 4096
# Of a block's matrices, in sixteenths.
SHARES = (2, 1, 1, 2, 3, 3, 4)


def block(num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    matrices = [num_elements * share // 16 // WIDTH for share in SHARES]
    shapes: list[tuple[int, ...]] = [(max(rows, 1), WIDTH) for rows in matrices]
    shapes += [(WIDTH,), (WIDTH,)]
    # Not zeros, on which a GPU may be faster.
    return [torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes]


def size(*lists: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensors in lists for tensor in tensors)


def cases(num_elements: int) -> dict[str, tuple[Callable[[], object], int]]:
    """What is measured, and the bytes it reads and writes."""
    single, other = (block(num_elements, torch.float32) for _ in range(2))
    half = block(num_elements, torch.bfloat16)
    flat = torch.empty(sum(t.numel() for t in single), device="cuda")
    source = torch.randn_like(flat)
    factor = torch.full((), 0.5, device="cuda")
    rows = half[-3]
    table = torch.randn(rows.shape[0] * 4, WIDTH, device="cuda")
    index = torch.randperm(table.shape[0], device="cuda")[: rows.shape[0]]
    num_bytes = {"bf16": size(half), "fp32": size(single)}
    both = num_bytes["bf16"] + num_bytes["fp32"]
    return {
        "copy": (lambda: flat.copy_(source), 2 * flat.nbytes),
        "copy and cast, bf16 to fp32": (lambda: ops.foreach_copy_(single, half), both),
        "copy and cast, fp32 to bf16": (lambda: ops.foreach_copy_(half, single), both),
        "add, bf16 to fp32": (
            lambda: ops.foreach_add_(single, half),
            both + num_bytes["fp32"],
        ),
        "add, fp32": (
            lambda: ops.foreach_add_(single, other),
            3 * num_bytes["fp32"],
        ),
        "norm": (lambda: ops.foreach_l2_norm(single), num_bytes["fp32"]),
        "scale": (lambda: ops.foreach_scale_(single, factor), 2 * num_bytes["fp32"]),
        "rows, bf16 to fp32": (
            lambda: ops.add_rows_(table, index, rows),
            rows.nbytes + 2 * 4 * rows.numel(),
        ),
    }


def main() -> None:
    num_elements, rounds = map(int, sys.argv[1:3])
    measured = cases(num_elements)
    actions = {name: action for name, (action, _) in measured.items()}
    times = in_turns(actions, rounds=rounds, warm_up=3)
    print(
        json.dumps(
            {name: measured[name][1] / median(ms) / 1e6 for name, ms in times.items()}
        )
    )


if __name__ == "__main__":
    main()
