"""Compiled blocks of a model with ``grads="fused"``: weight gradients are added where
they are reduced from, whatever order backwards come in and however often a layer is
called; one graph for equal blocks; what compiled code cannot fuse is exact or refused
by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._sharding.unit import unit_state
from lowtide._torch_version import VERSION

DIM, BLOCKS = 8, 3
BACKENDS = ("aot_eager", "inductor")
MICROBATCHES = 3


pytestmark = pytest.mark.usefixtures("one_rank")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Twice(Block):
    """Calls with equal arguments, which a compiler may take for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.down(torch.tanh(self.up(x)))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def sharded(grads: str, backend: str, block: type[Block] = Block) -> Any:
    torch.manual_seed(0)
    blocks = [block() for _ in range(BLOCKS)]
    model: Any = nn.Sequential(*blocks, nn.Linear(DIM, DIM))
    for each in blocks:
        if backend:
            each.compile(backend=backend, fullgraph=True)
        lowtide.fully_shard(each, grads=grads)
    lowtide.fully_shard(model, grads=grads)
    return model


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, DIM, generator=generator) for _ in range(MICROBATCHES)]


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).sum()


def in_turns(model: Any) -> None:
    for micro, x in enumerate(batches()):
        model.set_requires_gradient_sync(micro == MICROBATCHES - 1)
        loss_of(model, x).backward()


def each_reduced(model: Any) -> None:
    for x in batches():
        loss_of(model, x).backward()


def forwards_first(model: Any) -> None:
    for loss in [loss_of(model, x) for x in batches()]:
        loss.backward()


def one_backward(model: Any) -> None:
    torch.stack([loss_of(model, x) for x in batches()]).sum().backward()


def retained(model: Any) -> None:
    loss = loss_of(model, batches()[0])
    loss.backward(retain_graph=True)
    loss.backward()


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters()]


def trained(
    grads: str,
    backend: str,
    steps: Callable[[Any], None],
    block: type[Block] = Block,
) -> list[torch.Tensor]:
    model = sharded(grads, backend, block)
    steps(model)
    return gradients(model)


def uses(model: Any) -> list[int]:
    """Products added in place, by weight of a block."""
    units = [unit_state(block) for block in model[:BLOCKS]]
    return [use.added for unit in units for use in unit.unit.fused_uses if use.added]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [in_turns, each_reduced, forwards_first])
def test_compiled_layers_add_in_place_with_the_exact_modes_bits(backend, steps):
    expected = trained("exact", backend, steps)
    exact_graphs = counters["stats"]["unique_graphs"]
    fresh_counters()
    model = sharded("fused", backend)
    steps(model)
    for gradient, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(gradient, other)
    assert uses(model) == [MICROBATCHES] * (2 * BLOCKS)
    # One for the first block, whose input needs no gradient, one for the others.
    assert counters["stats"]["unique_graphs"] == exact_graphs == 2
    report = lowtide.memory_report(model).fused
    assert report is not None and report.exact == {}


def fresh_counters() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("steps", "block"),
    [(one_backward, Block), (in_turns, Twice), (in_turns, Checkpointed)],
)
def test_products_of_one_backward_are_all_added(backend, steps, block):
    expected = trained("exact", "", steps, block)
    model = sharded("fused", backend, block)
    steps(model)
    for gradient, other in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(gradient, other)
    calls = MICROBATCHES * (2 if block is Twice else 1)
    assert uses(model) == [calls] * (2 * BLOCKS)


def test_a_retained_graph_adds_again():
    expected = trained("exact", "", retained)
    found = trained("fused", "aot_eager", retained)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.slow
def test_the_compiled_backward_has_no_gradient_of_the_weight():
    model = sharded("fused", "")
    model(batches()[0])  # units, and full parameters
    block = model[1]
    compiled = torch.compile(Block.forward, backend="inductor", fullgraph=True)

    def run() -> torch.Tensor:
        x = batches()[0].requires_grad_()
        block.unshard()
        return compiled(block, x).sum()

    _, (_, backward) = run_fw_bw_and_get_code(run)
    assert backward.count("torch.ops.lowtide.add_weight_gradient.default(") == 2
    # The products: the gradients of `up` and of the input, and no weight's.
    products = [line for line in backward.splitlines() if "extern_kernels.mm" in line]
    assert len(products) == 2
    (returned,) = (line for line in backward.splitlines() if "return (" in line)
    # up.weight, up.bias, x, down.weight
    assert sum("None" in value for value in returned.split(",")) == 2


def test_inputs_of_backward_and_frozen_weights_add_nothing():
    model = sharded("fused", "aot_eager")
    x = batches()[0].requires_grad_()
    loss_of(model, x).backward(inputs=[x])
    assert x.grad is not None and uses(model) == []
    for block in model[:BLOCKS]:
        block.up.weight.requires_grad_(False)
    loss_of(model, x).backward()
    assert uses(model) == [1] * BLOCKS
    assert all(block.up.weight.grad is None for block in model[:BLOCKS])


def test_autocast_is_exact():
    def steps(model: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            in_turns(model)

    expected = trained("exact", "aot_eager", steps)
    fresh_counters()
    model = sharded("fused", "aot_eager")
    steps(model)
    for gradient, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(gradient, other)
    report = lowtide.memory_report(model).fused
    assert report is not None
    assert report.exact["1.up.weight"] == "not by its layer's forward (3 uses)"


def tangent(grads: str) -> torch.Tensor | None:
    model = sharded(grads, "eager")
    x = batches()[0]
    loss_of(model, x).backward()  # compiled without
    with forward_ad.dual_level():
        y = model(forward_ad.make_dual(x, torch.ones_like(x)))
        y.pow(2).sum().backward()
        return forward_ad.unpack_dual(y).tangent


@pytest.mark.skipif(VERSION >= (2, 14), reason="torch refuses to compile with them")
def test_tangents_pass_through():
    exact, fused = tangent("exact"), tangent("fused")
    assert exact is not None and fused is not None
    assert torch.equal(fused, exact)


class Transposed(Block):
    """A bias that torch adds after the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x.transpose(0, 1)))).transpose(0, 1)


def test_inputs_of_any_layout():
    expected = trained("exact", "", in_turns, Transposed)
    model = sharded("fused", "aot_eager", Transposed)
    in_turns(model)
    for gradient, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(gradient, other)


def whole_model(grads: str) -> list[torch.Tensor]:
    """Its first call builds the units, inside of compiled code."""
    torch.manual_seed(0)
    model: Any = Block()
    model.compile(backend="aot_eager")
    lowtide.fully_shard(model, grads=grads)
    each_reduced(model)
    return gradients(model)


def test_the_root_is_compiled_before_its_first_call():
    expected = whole_model("exact")
    fresh_counters()
    for gradient, other in zip(whole_model("fused"), expected, strict=True):
        assert torch.equal(gradient, other)


def test_a_gradient_that_compiled_code_has_not_is_refused():
    model = sharded("fused", "aot_eager")
    loss = loss_of(model, batches()[0])
    full = unit_state(model[2]).parameters[-1].full
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad with respect to"):
        torch.autograd.grad(loss, [full])


def test_other_weights_in_compiled_code_are_refused():
    model = sharded("fused", "")
    model(batches()[0])
    linear = model[1].up
    weights = {"weight": torch.randn(2 * DIM, DIM, requires_grad=True)}

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(linear, weights, (x,))

    model[1].unshard()
    out = torch.compile(call, backend="aot_eager")(batches()[0])
    with pytest.raises(RuntimeError, match="the full parameter that lowtide gathered"):
        out.sum().backward()


def test_opcheck():
    passed = {"test_schema", "test_autograd_registration", "test_faketensor"}
    operator = torch.ops.lowtide.fused_linear.default
    layouts = (torch.randn(2, 3, 4), torch.randn(3, 2, 4).transpose(0, 1))
    for bias, x in itertools.product((torch.randn(5), None), layouts):
        arguments = (x, torch.randn(5, 4), bias)
        found = torch.library.opcheck(operator, arguments)
        assert found == dict.fromkeys([*passed, "test_aot_dispatch_dynamic"], "SUCCESS")
    # The other checks run it on copies of the weight, which no unit has.
    found = torch.library.opcheck(
        torch.ops.lowtide.add_weight_gradient.default,
        (torch.randn(5, 4), torch.randn(6, 5), torch.randn(6, 4)),
        test_utils=["test_autograd_registration"],
    )
    assert found == {"test_autograd_registration": "SUCCESS"}
