"""Lists of tensors, optimizers, copies between devices and new tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.operator_cases.case import (
    BF16,
    FP32,
    SQUARE,
    Make,
    case,
)

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
