"""Blocks compiled with fullgraph inside a region keep their bits, in one graph; names
that the region around compiled code can not see are refused instead of being lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowtide
from lowtide import ActivationPolicy, checkpoint, tag
from support.blocks import Mlp, assert_same_bits, rows, stack, step

LAYERS = 3


def compiled(order: str, **policy) -> nn.Sequential:
    def wrap(block: nn.Module) -> nn.Module:
        if order == "compile first":
            block.compile(backend="aot_eager", fullgraph=True)
        checkpoint(block, ActivationPolicy(**policy))
        if order == "checkpoint first":
            block.compile(backend="aot_eager", fullgraph=True)
        return block

    return stack(LAYERS, wrap=wrap)


@pytest.mark.parametrize("order", ["compile first", "checkpoint first"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_boundary_offload_around_compiled_blocks(order: str, prefetch: int) -> None:
    plain = stack(LAYERS)
    for block in plain:
        block.compile(backend="aot_eager", fullgraph=True)
    ours = compiled(order, offload=["input"], prefetch=prefetch)
    for seed in range(3):
        with torch._dynamo.config.patch(error_on_recompile=seed >= 1):
            assert_same_bits(step(ours, rows(seed)), step(plain, rows(seed)))
    assert lowtide.memory_report(ours).activations.names["input"].moved == 3 * LAYERS
    assert counters["graph_break"] == {}


def test_a_name_inside_compiled_code_is_refused_by_name():
    ours = compiled("compile first", offload=["hidden"])
    with pytest.raises(ValueError, match="lowtide: ") as error:
        step(ours)
    assert str(error.value) == (
        "lowtide: ActivationPolicy.offload: expected 'hidden' to name a value in eager "
        "code of Mlp, got it inside compiled code, which the region around it can not "
        "see into. List 'input', or compile the submodules; save and recompute also "
        "work when compile() is called after lowtide.checkpoint."
    )


def test_a_name_on_an_argument_inside_compiled_code_is_refused_by_name():
    ours = compiled("compile first", offload=["residual"])
    with pytest.raises(ValueError, match="'residual'.*inside compiled code"):
        step(ours)


class Up(nn.Linear):
    """torch 2.12 and 2.13 compile no module of torch's own by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def compile_up(block: nn.Module) -> None:
    block.up.__class__ = Up
    block.up.compile(backend="aot_eager", fullgraph=True)


def test_compiled_submodules_and_names_around_them():
    def wrap(block: Mlp) -> nn.Module:
        compile_up(block)
        return checkpoint(block, ActivationPolicy(offload=["residual"]))

    plain = stack(LAYERS)
    for block in plain:
        compile_up(block)
    ours = stack(LAYERS, wrap=wrap)
    for seed in range(2):
        assert_same_bits(step(ours, rows(seed)), step(plain, rows(seed)))
    assert lowtide.memory_report(ours).activations.names["residual"].moved == 2 * LAYERS


class Convolution(nn.Module):
    """inductor lets torch convolve, and adds and cuts off in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x[:, None]) + 1.0)[:, 0]


class AroundConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.inner = nn.Linear(8, 8), Convolution()

    def forward(self, x: Tensor) -> Tensor:
        h = tag(self.up(x), "up")
        return torch.sin(tag(self.inner(h.sin()), "inner"))


@pytest.mark.slow
def test_a_name_on_what_compiled_code_made_is_refused():
    def gradients(model: nn.Module) -> list[Tensor]:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
        model(x.requires_grad_() * 1.5).pow(2).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, ours = AroundConvolution(), AroundConvolution()
    for model in (plain, ours):
        model.inner.compile(backend="inductor", fullgraph=True)
    checkpoint(ours, ActivationPolicy(save=["up", "inner"]))
    with pytest.raises(ValueError, match="'inner' to save.*1 x made by compiled code"):
        gradients(ours)
    ours.zero_grad()
    for theirs, mine in zip(gradients(plain), gradients(ours), strict=True):
        assert torch.equal(theirs, mine)
