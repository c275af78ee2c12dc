"""``grads="fused"``: layers that add to their weight's ``main_grad``, as Megatron's and
TransformerEngine's do, write into the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from support.fused import DIM, HIDDEN, every_microbatch_reduces, only_the_last_reduces
from support.recorder import Record, Recorder


class _MainGradLinear(torch.autograd.Function):
    """What Megatron's and TransformerEngine's fused layers do with `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x, weight = ctx.saved_tensors
        weight.main_grad = ctx.main_grad
        product = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        assert weight.main_grad.dtype == torch.float32
        weight.main_grad.add_(product)
        dummy = None
        if hasattr(weight, "grad_added_to_main_grad"):
            zeros = getattr(weight, "zero_out_wgrad", False)
            fill = 0.0 if zeros else float("nan")
            dummy = torch.full_like(weight, fill)
            weight.grad_added_to_main_grad = True
        return gradient @ weight, dummy


class MainGradLinear(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.gradient_accumulation_fusion = True
        self.weight = nn.Parameter(torch.randn(HIDDEN, DIM) / 8)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.weight, "main_grad"):  # the exact mode's
            y = F.linear(x, self.weight)
        else:
            self.weight.zero_out_wgrad = self.shared
            y = _MainGradLinear.apply(x, self.weight)
        return y + self.weight.sum() if self.shared else y


def main_grads(grads: str, shared: bool) -> tuple[Record, tuple[str, ...]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(MainGradLinear(shared), nn.Linear(HIDDEN, DIM))
    lowtide.fully_shard(model[0], grads=grads)
    lowtide.fully_shard(model, grads=grads)
    record = Recorder()
    only_the_last_reduces(model, record)
    if not shared:
        every_microbatch_reduces(model, record)
    report = lowtide.memory_report(model).fused
    return record.values, report.fused if report else ()


@pytest.mark.parametrize("shared", [False, True])
def test_layers_that_write_main_grad_write_into_the_sum(pool_of, shared):
    for world_size in (1, 2):
        exact = pool_of(world_size).run(main_grads, "exact", shared)
        fused = pool_of(world_size).run(main_grads, "fused", shared)
        for (expected, _), (actual, names) in zip(exact, fused, strict=True):
            assert "0.weight" in names
            for (name, value), (_, other) in zip(actual, expected, strict=True):
                torch.testing.assert_close(value, other, msg=lambda m, n=name: n + m)


def main_grad_with_gaps() -> dict[str, str]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(MainGradLinear(), nn.Linear(HIDDEN, DIM))
    lowtide.fully_shard(model, grads="fused")
    return lowtide.memory_report(model).fused.exact


def test_main_grad_with_gaps_stays_exact(pool_of):
    for exact in pool_of(3).run(main_grad_with_gaps):
        assert exact == {
            "MainGradLinear.weight": (
                "main_grad: a rank's rows are no multiple of 128 elements"
            )
        }
