"""``grads="fused"``: fp32 bits of the exact mode, bf16 errors below its."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import lowtide
from support.fused import (
    STEPS,
    data,
    every_microbatch_reduces,
    model_of,
    only_the_last_reduces,
    plain,
    steps,
    uses,
)
from support.recorder import Record, Recorder, assert_same_records

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def forwards_first(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        losses = [model(data(2 * step + micro)).pow(2).sum() for micro in range(2)]
        for loss in losses:
            loss.backward()

    steps(model, record, backward)


def retain_graph(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        loss = model(data(step)).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for block in model.blocks:
        block.set_reshard_after_backward(False)
    steps(model, record, backward)


def recomputed(model: Any, record: Recorder) -> None:
    model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=False)
    plain(model, record)


def recomputed_within(model: Any, record: Recorder) -> None:
    for block in model.blocks:
        lowtide.checkpoint(block, lowtide.ActivationPolicy())
    plain(model, record)


def recomputed_reentrant(model: Any, record: Recorder) -> None:
    model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=True)
    steps(model, record, lambda s: model(data(s, grad=True)).pow(2).sum().backward())


def frozen_weights(model: Any, record: Recorder) -> None:
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].odd.weight.requires_grad_(False)
    plain(model, record)


def input_gradients_only(model: Any, record: Recorder) -> None:
    x = data(0, grad=True)
    model(x).pow(2).sum().backward(inputs=[x])
    record.add("input", x.grad)
    assert all(p.grad is None for p in model.parameters())
    plain(model, record)


def input_gradients_by_grad(model: Any, record: Recorder) -> None:
    x = data(0, grad=True)
    (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), [x])
    record.add("input", gradient)
    assert all(p.grad is None for p in model.parameters())
    plain(model, record)


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (
        plain,
        every_microbatch_reduces,
        only_the_last_reduces,
        forwards_first,
        retain_graph,
        recomputed,
        recomputed_within,
        recomputed_reentrant,
        frozen_weights,
        input_gradients_only,
        input_gradients_by_grad,
    )
}


def recorded(grads: str, name: str) -> tuple[Record, int]:
    record = Recorder()
    model = model_of(grads)
    PATTERNS[name](model, record)
    return record.values, uses(model)


@pytest.mark.parametrize("name", PATTERNS)
def test_has_the_exact_modes_bits(pool_of, world_size, name):
    exact = pool_of(world_size).run(recorded, "exact", name)
    fused = pool_of(world_size).run(recorded, "fused", name)
    for (expected, none), (actual, some) in zip(exact, fused, strict=True):
        assert_same_records(actual, expected)
        assert none == 0
        assert some >= STEPS * 5


# -- errors of bf16 --------------------------------------------------------------------


def errors_of(grads: str, rows: int, micros: int) -> dict[str, float]:
    """Of every weight's gradient: its distance from the fp64 sum of the products of
    the same bf16 factors."""
    model = model_of(grads, mp_policy=BF16)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    exact: dict[str, torch.Tensor] = {}
    inputs: dict[str, torch.Tensor] = {}

    def on_output(name: str) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            x = inputs[name].double().flatten(0, -2)
            product = gradient.double().flatten(0, -2).t() @ x
            exact[name] = exact.get(name, 0) + product

        return add

    def on_forward(name: str) -> Callable[..., None]:
        def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            inputs[name] = args[0].detach().clone()
            output.register_hook(on_output(name))

        return watch

    for name, linear in linears.items():
        linear.register_forward_hook(on_forward(name))
    for micro in range(micros):
        model.set_requires_gradient_sync(micro == micros - 1)
        model(data(micro, rows=rows)).pow(2).sum().backward()
    found = {}
    for name, linear in linears.items():
        gradient = linear.weight.grad.full_tensor().double()
        found[name] = float((gradient - exact[name]).norm() / exact[name].norm())
    return found


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("micros", [1, 4])
def test_error_against_fp64_is_below_the_exact_modes(pool_of, rows, micros):
    (exact,) = pool_of(1).run(errors_of, "exact", rows, micros)
    (fused,) = pool_of(1).run(errors_of, "fused", rows, micros)
    for name, error in fused.items():
        assert error <= exact[name], name
        assert error < 1e-6, name
        assert exact[name] > 1e-4, name
