"""Errors of what lowtide computes in another order than torch, beside fp64: of a
weight's gradient in both modes, and of the loss of deferred logits. For the one rank of
a process group."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Errors = dict[str, float]


def gradient_errors(device: str, rows: int = 512, width: int = 256) -> dict[str, float]:
    """Of a sum over four microbatches of bf16 factors, relative to it."""
    import lowtide

    torch.manual_seed(0)
    factors = torch.randn(4, 2, rows, width, device=device).bfloat16()
    exact = sum(g.double().t() @ x.double() for x, g in factors)
    found = {}
    policy = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    modes: tuple[Any, ...] = ("exact", "fused")
    for grads in modes:
        linear: Any = nn.Linear(width, width, bias=False, device=device)
        model: Any = nn.Sequential(linear)
        lowtide.fully_shard(model, mp_policy=policy, grads=grads)
        for i, (x, g) in enumerate(factors):
            model.set_requires_gradient_sync(i == len(factors) - 1)
            model(x).backward(g)
        report = lowtide.memory_report(model).fused
        if grads == "fused" and (report is None or report.exact):
            raise RuntimeError(
                f"beside_fp64.py: expected a fused gradient, got {report}"
            )
        error = linear.weight.grad.to_local().double() - exact
        found[grads] = float(error.norm() / exact.norm())
    return found


def deferred_errors(
    device: str, tokens: int, width: int = 2048, vocabulary: int = 9000
) -> dict[str, dict[str, Errors]]:
    """By dtype, of torch's loss ("plain") and of that of deferred logits of a sharded
    head: largest differences, relative to the largest number of a tensor."""
    import lowtide

    found = {}
    for name, dtype in DTYPES.items():
        inputs = loss_inputs(device, dtype, tokens, width, vocabulary)
        truth = loss_of_float64(*inputs, dtype)
        found[name] = {}
        for system in ("plain", "lowtide"):
            hidden, weight, targets = inputs
            hidden = hidden.clone().requires_grad_()
            head: Any = nn.Linear(width, vocabulary, bias=False, device="meta")
            head.weight = nn.Parameter(weight.clone())
            model: Any = nn.Sequential(head)
            if system == "lowtide":
                lowtide.fully_shard(head)
                lowtide.fully_shard(model)
                lowtide.defer_logits(head)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "lowtide: deferred logits")
                loss = F.cross_entropy(model(hidden).float(), targets)
            loss.backward()
            gradient = head.weight.grad
            if system == "lowtide":
                gradient = gradient.to_local()
            seen = {"loss": loss.detach(), "hidden": hidden.grad, "weight": gradient}
            found[name][system] = {
                what: largest_error(value, truth[what]) for what, value in seen.items()
            }
    return found


def loss_inputs(
    device: str, dtype: torch.dtype, tokens: int, width: int, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers over powers of two: logits are exact in fp32, whatever the order
    of their sums, and all round them to ``dtype`` alike."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).mul(16).round() / 16
    weight = torch.randn(vocabulary, width, generator=generator).mul(16).round() / 512
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden.to(device, dtype), weight.to(device, dtype), targets.to(device)


def loss_of_float64(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Of logits rounded to ``dtype``, as a head's are; nothing else is rounded."""
    hidden, weight = (t.double().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight.t()
    rounded = logits + (logits.to(dtype).double() - logits).detach()
    loss = F.cross_entropy(rounded, targets)
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    return {"loss": loss.detach(), "hidden": of_hidden, "weight": of_weight}


def largest_error(actual: Tensor | None, expected: Tensor) -> float:
    assert actual is not None
    return float((actual.double() - expected).abs().max() / expected.abs().max())
