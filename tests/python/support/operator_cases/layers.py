"""What layers run: attention, normalisation, elementwise, softmax, losses, products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from support.operator_cases.case import (
    BF16,
    FP16,
    FP32,
    SQUARE,
    Make,
    case,
    pointwise,
)

# -- attention ------------------------------------------------------------------------

sdpa = F.scaled_dot_product_attention


def attention_case(
    name: str,
    length: int,
    dim: int,
    *,
    heads: int = 8,
    kv_heads: int | None = None,
    dtype: torch.dtype = BF16,
    masked: bool = False,
    queries: int | None = None,
    **kwargs: Any,
) -> None:
    def inputs(make: Make) -> list[Any]:
        kv = heads if kv_heads is None else kv_heads
        q = make.heads(queries or length, dim, heads, dtype)
        found = [q, *(make.heads(length, dim, kv, dtype) for _ in range(2))]
        if masked:
            columns = -(-length // 8) * 8
            found.append(make.constant(length, columns, dtype=dtype)[:, :length])
        return found

    def function(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        grouped = kv_heads is not None
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=grouped, **kwargs)

    case(f"attention {name}", inputs, function)


attention_case("flash", 1024, 64)
attention_case("flash causal", 1024, 128, is_causal=True)
attention_case("flash dropout", 1024, 64, dropout_p=0.1)
attention_case("flash grouped", 1024, 64, kv_heads=2, is_causal=True)
attention_case("flash few blocks", 512, 64, heads=1)
attention_case("flash few queries", 1024, 64, queries=256)
attention_case("flash padded", 1024, 60, is_causal=True)
for length in (64, 100, 1000):
    for dim in (16, 40, 96, 128, 192, 256):
        attention_case(f"flash {length} {dim}", length, dim)
        attention_case(f"masked {length} {dim}", length, dim, masked=True)
        attention_case(f"fp32 {length} {dim}", length, dim, dtype=FP32)
attention_case("wide", 256, 512)
attention_case("masked wide, many heads", 1000, 256, heads=64, masked=True)
attention_case("causal cross", 1024, 64, queries=256, is_causal=True)
attention_case("composed", 256, 64, kv_heads=2, dtype=FP32, is_causal=True)
case(
    "attention [b, h, s, d]",
    lambda make: [make.floats(2, 8, 1024, 64) for _ in range(3)],
    lambda q, k, v: sdpa(q, k, v, is_causal=True),
)
case(
    "attention of three dims",
    lambda make: [make.floats(2, 256, 64) for _ in range(3)],
    sdpa,
)
case(
    "attention bool mask",
    lambda make: [*(make.heads(256, 64) for _ in range(3)), make.mask(256, 256)],
    lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
)
case(
    "attention mask gradient",
    lambda make: [
        *(make.heads(256, 64) for _ in range(3)),
        make.floats(2, 8, 256, 256),
    ],
    lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
)
case(
    "attention without gradients",
    lambda make: [make.heads(256, 64, dtype=FP32).detach() for _ in range(3)],
    sdpa,
)

# -- normalisation --------------------------------------------------------------------

for rows, columns in ((4096, 1024), (131072, 64), (300000, 128), (70000, 2048)):
    shape = f"{rows} x {columns}"
    case(
        f"rms_norm {shape}",
        lambda make, r=rows, c=columns: (make.floats(r, c), make.floats(c)),
        lambda x, w: F.rms_norm(x, w.shape, w),
    )
    case(
        f"layer_norm {shape}",
        lambda make, r=rows, c=columns: (make.floats(r, c), *[make.floats(c)] * 2),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    )
case(
    "rms_norm fp32",
    lambda make: (make.floats(512, 256, dtype=FP32), make.floats(256, dtype=FP32)),
    lambda x, w: F.rms_norm(x, (256,), w),
)
case(
    "rms_norm plain",
    lambda make: (make.floats(512, 256),),
    lambda x: F.rms_norm(x, (256,)),
)
case(
    "rms_norm mixed",
    lambda make: (make.floats(4096, 1024), make.floats(1024, dtype=FP32)),
    lambda x, w: F.rms_norm(x, (1024,), w),
)
case(
    "rms_norm strided",
    lambda make: (make.floats(64, 512, 256).transpose(0, 1), make.floats(256)),
    lambda x, w: F.rms_norm(x, (256,), w).sum(),
)
case(
    "layer_norm strided",
    lambda make: (make.floats(64, 512, 256).transpose(0, 1), make.floats(256)),
    lambda x, w: F.layer_norm(x, (256,), w, w).sum(),
)
case(
    "layer_norm plain",
    lambda make: (make.floats(512, 256),),
    lambda x: F.layer_norm(x, (256,)),
)
case(
    "group_norm", lambda make: (make.floats(8, 64, 1024),), lambda x: F.group_norm(x, 8)
)

# -- elementwise, softmax and losses --------------------------------------------------


pointwise("silu", F.silu)
pointwise("gelu", F.gelu)
pointwise("relu", F.relu)
pointwise("glu", F.glu)
pointwise("dropout", lambda x: F.dropout(x, 0.1))
pointwise("softmax", lambda x: torch.softmax(x, -1))
pointwise("softmax to fp32", lambda x: torch.softmax(x, -1, dtype=FP32))
pointwise("softmax fp16 to fp32", lambda x: torch.softmax(x, -1, dtype=FP32), FP16)
pointwise(
    "log_softmax fp16 to fp32", lambda x: torch.log_softmax(x, -1, dtype=FP32), FP16
)
pointwise("log_softmax", lambda x: F.log_softmax(x, -1))
pointwise("logsumexp", lambda x: x.logsumexp(-1))
pointwise("cast", lambda x: x.float())
pointwise("power", lambda x: x.pow(2))
pointwise("clamp", lambda x: x.clamp(-1, 1))
pointwise("division", lambda x: x / 3)
case(
    "product with a row",
    lambda make: (make.floats(4096, 1024), make.floats(1024)),
    lambda x, y: x * y,
)
case(
    "complex rotation",
    lambda make: (
        make.floats(4, 1024, 8, 64, dtype=FP32),
        make.constant(32, dtype=FP32),
    ),
    lambda x, one: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(one, one)
    ).flatten(-2),
)


def classified(name: str, function: Callable[..., Any]) -> None:
    case(name, lambda make: (make.floats(1024, 8192), make.longs(1024)), function)


classified("cross_entropy", lambda x, y: F.cross_entropy(x.float(), y))
classified("cross_entropy bf16", F.cross_entropy)
classified(
    "cross_entropy smooth", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)
)
classified(
    "cross_entropy summed", lambda x, y: F.cross_entropy(x, y, reduction="none").sum()
)
for name, loss in (
    ("mse_loss", F.mse_loss),
    ("huber_loss", F.huber_loss),
    ("smooth_l1_loss", F.smooth_l1_loss),
    ("bce", F.binary_cross_entropy_with_logits),
    ("kl_div", F.kl_div),
):
    case(name, lambda make: (make.floats(1024, 64), make.floats(1024, 64)), loss)

# -- matrix products ------------------------------------------------------------------


def products(name: str, *shapes: tuple[int, ...], function: Callable[..., Any]) -> None:
    case(name, lambda make: [make.floats(*shape) for shape in shapes], function)


products("linear", (4096, 1024), (512, 1024), (512,), function=F.linear)
products("linear without bias", (4, 512, 1024), (512, 1024), function=F.linear)
products("linear of three dims", (4, 512, 1024), (512, 1024), (512,), function=F.linear)
products("addmm", (512,), (1024, 256), (256, 512), function=torch.addmm)
products("bmm", (8, 512, 256), (8, 256, 512), function=torch.bmm)
products("baddbmm", (8, 64, 64), (8, 64, 32), (8, 32, 64), function=torch.baddbmm)
products("mv", (1024, 512), (512,), function=torch.mv)
products("dot", (1024,), (1024,), function=torch.dot)
products("summed product", SQUARE, SQUARE, function=lambda a, b: (a @ b).sum())
products(
    "einsum",
    (4, 128, 64),
    (4, 64, 128),
    function=lambda a, b: torch.einsum("bij,bjk", a, b),
)
case(
    "mm of an expanded matrix",
    lambda make: (make.constant(1, 1).expand(1024, 1024), make.constant(1024, 1024)),
    torch.mm,
)
case(
    "bmm of expanded matrices",
    lambda make: (make.constant(1, 1, 1).expand(4, 64, 64), make.constant(4, 64, 64)),
    torch.bmm,
)
