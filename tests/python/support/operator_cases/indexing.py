"""Reductions, embeddings and indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from support.operator_cases.case import (
    FP32,
    SQUARE,
    case,
    pointwise,
)

# -- reductions -----------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "norm": lambda x, dim=None: torch.linalg.vector_norm(x, dim=dim),
    "std": lambda x, dim=None: x.std(dim) if dim is not None else x.std(),
    "argmax": torch.argmax,
    "any": lambda x, dim=None: (x > 0).any() if dim is None else (x > 0).any(dim),
}
for name, reduction in REDUCTIONS.items():
    for shape in ((4096, 1024), (65536, 128), (100, 37), (16, 100000)):
        for dim in (None, 0, 1):
            case(
                f"{name} of {shape} over {dim}",
                lambda make, s=shape: (make.constant(*s),),
                lambda x, f=reduction, d=dim: f(x) if d is None else f(x, d),
            )
case(
    "sum of a transposed matrix",
    lambda make: (make.constant(4096, 1024).t(),),
    lambda x: x.sum(0),
)
case(
    "sum over two dims",
    lambda make: (make.constant(64, 512, 128),),
    lambda x: x.sum((0, 1)),
)
case(
    "sum fp32",
    lambda make: (make.constant(4096, 1024, dtype=FP32),),
    lambda x: x.sum(0),
)
case("sum of booleans", lambda make: (make.mask(4096, 64),), torch.sum)
case("count_nonzero", lambda make: (make.constant(4096),), torch.count_nonzero)
case("maximum", lambda make: (make.constant(4096, 1024),), torch.max)
case("maximum of rows", lambda make: (make.floats(4096, 1024),), lambda x: x.max(-1)[0])
case("cumsum of a vector", lambda make: (make.longs(100_000),), lambda x: x.cumsum(0))
case("cumsum of rows", lambda make: (make.floats(4096, 64),), lambda x: x.cumsum(-1))

# -- embedding and indexing -----------------------------------------------------------

for count in (100, 2304, 3072, 3073, 5000, 16384, 100_000):
    case(
        f"embedding of {count}",
        lambda make, n=count: (make.floats(200_000, 32), make.longs(n)),
        lambda w, i: F.embedding(i, w, padding_idx=3),
    )
    case(
        f"embedding by frequency of {count}",
        lambda make, n=count: (make.floats(200_000, 32), make.longs(n)),
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
    )
    case(
        f"accumulating index_put of {count}",
        lambda make, n=count: (make.floats(1000, 4), make.longs(n), make.floats(n, 4)),
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
    )
case(
    "embedding of few rows",
    lambda make: (make.floats(100, 512), make.longs(4096)),
    lambda w, i: F.embedding(i, w),
)
case(
    "embedding fp32",
    lambda make: (make.floats(16384, 64, dtype=FP32), make.longs(4096)),
    lambda w, i: F.embedding(i, w),
)
for name, function in {
    "rows": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 16)),
    "index_put": lambda x, i: x.index_put((i,), x[i]),
    "index_add": lambda x, i: x.index_add(0, i, x[i]),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 64), x[i]),
}.items():
    case(name, lambda make: (make.floats(1000, 64), make.longs(4096)), function)
case(
    "masked_fill",
    lambda make: (make.floats(*SQUARE), make.mask(*SQUARE)),
    lambda x, m: x.masked_fill(m, 0),
)
case(
    "where",
    lambda make: (make.floats(*SQUARE), make.mask(*SQUARE)),
    lambda x, m: torch.where(m, x, 0),
)
pointwise("tril", torch.tril)
pointwise("slice", lambda x: x[:, :512] * 2)
pointwise("chunks", lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1])
pointwise("concatenation", lambda x: torch.cat([x, x], 1))
pointwise("stack", lambda x: torch.stack([x, x]))
pointwise("padding", lambda x: F.pad(x, (0, 28)))
pointwise("roll", lambda x: x.roll(1, 0))
pointwise("repeat", lambda x: x.repeat(2, 1))
pointwise("repeat_interleave", lambda x: x.repeat_interleave(2, 0))
pointwise("transposed copy", lambda x: x.t().contiguous())
