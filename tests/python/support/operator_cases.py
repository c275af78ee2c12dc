"""Operators and small functions for operator_dry_run: what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Make:
    """Inputs of a case, on its device; contents do not matter."""

    device: torch.device

    def floats(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        tensor = torch.empty(*shape, dtype=dtype, device=self.device)
        return tensor.requires_grad_()

    def constant(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def longs(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self.device)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bool, device=self.device)

    def heads(
        self, length: int, dim: int, count: int = 8, dtype: torch.dtype = BF16
    ) -> torch.Tensor:
        """[2, count, length, dim] over [2, length, count, dim], as a projection
        leaves them."""
        x = torch.empty(2, length, count, dim, dtype=dtype, device=self.device)
        return x.transpose(1, 2).requires_grad_()


@dataclass(frozen=True)
class Case:
    inputs: Callable[[Make], Iterable[Any]]
    function: Callable[..., Any]


CASES: dict[str, Case] = {}


def case(
    name: str, inputs: Callable[[Make], Any], function: Callable[..., Any]
) -> None:
    assert name not in CASES, name
    CASES[name] = Case(inputs, function)


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

SQUARE = (1024, 1024)


def pointwise(
    name: str, function: Callable[..., Any], dtype: torch.dtype = BF16
) -> None:
    case(name, lambda make: (make.floats(*SQUARE, dtype=dtype),), function)


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

# -- many tensors: sharded copies and optimizers --------------------------------------


def chunk_cat_case(name: str, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    def inputs(make: Make) -> Any:
        columns = sum(-(-r // 8) for r in rows) * 256
        yield [make.constant(r, 256, dtype=dtype) for r in rows]
        yield make.constant(8, columns, dtype=FP32)

    case(name, inputs, lambda t, out: torch._chunk_cat(t, dim=0, num_chunks=8, out=out))


chunk_cat_case("chunk_cat", (1000, 24, 3), FP32)
chunk_cat_case("chunk_cat of large tensors", (100_000, 128_256), FP32)
chunk_cat_case("chunk_cat with a cast", (1000, 24, 3), BF16)


def split_case(name: str, ranks: int, sizes: tuple[int, ...]) -> None:
    case(
        name,
        lambda make: (
            make.constant(ranks, sum(sizes)),
            [make.constant(ranks, size) for size in sizes],
        ),
        lambda flat, out: torch.split_with_sizes_copy(
            flat, list(sizes), dim=1, out=out
        ),
    )


split_case("split_with_sizes_copy", 2, (1000, 24))
split_case("split_with_sizes_copy of a unit", 8, (2_000_000, 4096, 7_000_000, 512))
split_case("split_with_sizes_copy of many ranks", 256, (60_000, 16, 230_000, 16))

FOREACH: dict[str, Callable[..., Any]] = {
    "norm": lambda x: torch._foreach_norm(x),
    "infinity norm": lambda x: torch._foreach_norm(x, float("inf")),
    "max": lambda x: torch._foreach_max(x),
    "add": lambda x: torch._foreach_add(x, 1.0),
    "sqrt": lambda x: torch._foreach_sqrt(x),
    "lerp": lambda x: torch._foreach_lerp_(x, x, 0.1),
    "addcdiv": lambda x: torch._foreach_addcdiv_(x, x, x, 0.1),
    "copy": lambda x: torch._foreach_copy_(x, x),
}
for name, function in FOREACH.items():
    case(
        f"foreach {name}",
        lambda make: ([make.constant(n, 1024) for n in (1, 100, 1024)],),
        function,
    )


def optimizer_case(name: str, kind: Callable[..., torch.optim.Optimizer]) -> None:
    def inputs(make: Make) -> Any:
        parameters = [
            torch.nn.Parameter(make.constant(n, dtype=FP32)) for n in (1000, 1 << 20)
        ]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = kind(parameters)
        optimizer.step()
        yield optimizer

    case(name, inputs, lambda optimizer: optimizer.step())


for settings in ({"fused": True}, {"foreach": True}, {"foreach": False}):
    label = "".join(f"{k}={v}" for k, v in settings.items())
    optimizer_case(f"AdamW {label}", lambda p, s=settings: torch.optim.AdamW(p, **s))
    optimizer_case(
        f"SGD {label}", lambda p, s=settings: torch.optim.SGD(p, momentum=0.9, **s)
    )
case(
    "clip_grad_norm_",
    lambda make: (
        [with_gradient(make.constant(n, dtype=FP32)) for n in (10, 1 << 20)],
    ),
    lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
)


def with_gradient(values: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(values)
    parameter.grad = torch.empty_like(values)
    return parameter


# -- copies between devices, and making tensors ---------------------------------------


def transfer(
    name: str,
    host: Callable[[], torch.Tensor],
    device: Callable[[Make], torch.Tensor],
    *,
    to_host: bool = False,
    non_blocking: bool = False,
) -> None:
    def function(h: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        to, source = (h, d) if to_host else (d, h)
        return to.copy_(source, non_blocking=non_blocking)

    case(name, lambda make: (host(), device(make)), function)


def wide_host() -> torch.Tensor:
    return torch.zeros(*SQUARE)


def host_of_device() -> torch.Tensor:
    return torch.zeros(*SQUARE, dtype=BF16)


def plain(make: Make) -> torch.Tensor:
    return make.constant(*SQUARE)


def transposed(make: Make) -> torch.Tensor:
    return make.constant(*SQUARE).t()


for label, to_host in (("to the device", False), ("to the host", True)):
    for mode, non_blocking in (("", False), (", non-blocking", True)):
        for layout, device in (("", plain), (", transposed", transposed)):
            for cast, host in (("", host_of_device), (", cast", wide_host)):
                transfer(
                    f"copy {label}{mode}{layout}{cast}",
                    host,
                    device,
                    to_host=to_host,
                    non_blocking=non_blocking,
                )
case("to(device)", lambda make: (make.device,), lambda d: wide_host().to(d, BF16))
case("item", lambda make: (make.constant(1),), lambda x: x.item())
case("arange", lambda make: (make.device,), lambda d: torch.arange(1000, device=d))
case("randn", lambda make: (make.device,), lambda d: torch.randn(10_000, device=d))
case("full", lambda make: (make.device,), lambda d: torch.full((1000,), 1.0, device=d))
case("eye", lambda make: (make.device,), lambda d: torch.eye(100, device=d))
case("bernoulli", lambda make: (make.constant(4096),), torch.bernoulli)
