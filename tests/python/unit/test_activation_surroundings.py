"""What is around a region counts in its recomputation: other regions and hooks,
autocast, random generators, the default device."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lowtide import ActivationPolicy, checkpoint
from lowtide._activation.regions import region_state
from lowtide._activation.report import planned_bytes
from support.blocks import Mlp, assert_same_bits, gradients, rows, stack, step
from support.regions import leaf, region


def nested(depth: int, wrap: bool) -> nn.Module:
    module: nn.Module = Mlp(dropout=0.1)
    for _ in range(depth):
        module = nn.Sequential(Mlp(dropout=0.1), module)
        if wrap:
            checkpoint(module)
    return module


def test_nested_regions():
    torch.manual_seed(5)
    plain = nested(4, wrap=False)
    torch.manual_seed(5)
    ours = nested(4, wrap=True)
    for _ in range(2):
        assert_same_bits(step(ours), step(plain))


def test_a_forward_that_is_computed_again_is_not_another_call():
    inner = checkpoint(Mlp(), ActivationPolicy(offload=["input"]))
    module = checkpoint(nn.Sequential(Mlp(), inner, Mlp()))
    step(module)
    assert region_state(inner).region.num_calls == 1
    x = rows()
    assert planned_bytes(module) == 2 * x.nbytes  # the region's and the one ahead


def test_nested_regions_do_not_keep_inner_inputs():
    inner_input = []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = Mlp(), checkpoint(Mlp())

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if not inner_input:
                inner_input.append(weakref.ref(y))
            return self.inner(y)

    module = checkpoint(Outer())
    x = rows().requires_grad_()
    loss = module(x).sum()
    assert inner_input[0]() is None
    loss.backward()
    assert x.grad is not None


def test_inside_and_around_torch_checkpoints():
    def run(inner, outer):
        torch.manual_seed(7)
        a, b = inner(Mlp(dropout=0.1)), Mlp(dropout=0.1)
        x = rows().requires_grad_()
        torch.manual_seed(3)
        loss = outer(nn.Sequential(a, b), x).square().sum()
        loss.backward()
        return gradients([x, *a.parameters(), *b.parameters()])

    def plain(module, x):
        return module(x)

    def theirs(module, x):
        return torch_checkpoint(module, x, use_reentrant=False)

    def reentrant(module, x):
        return torch_checkpoint(module, x, use_reentrant=True)

    expected = run(lambda m: m, plain)
    assert_same_bits(run(checkpoint, theirs), expected)
    assert_same_bits(run(checkpoint, reentrant), expected)
    assert_same_bits(run(lambda m: m, lambda m, x: checkpoint(m)(x)), expected)


def test_hooks_around_a_region_pack_its_inputs():
    model = stack(2, wrap=checkpoint)
    expected = step(stack(2))
    with torch.autograd.graph.save_on_cpu():
        got = step(model)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_replayed(inside: bool):
    def run(wrap):
        model = stack(wrap=wrap)
        x = rows().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x * 1.0).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss.detach(), *gradients([x, *model.parameters()])]

    assert_same_bits(run(checkpoint), run(None))


def test_a_forward_without_grad_leaves_nothing_in_autocasts_cache():
    def run(wrap):
        model = stack(1, wrap=wrap)
        x = rows().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().sum().backward()
            model.zero_grad()
            x.grad = None
            model(x).float().sum().backward()
        return gradients([x, *model.parameters()])

    assert_same_bits(run(checkpoint), run(None))


def test_random_state_after_backward_is_as_without_recomputation():
    after = []
    for wrap in (None, checkpoint):
        step(stack(dropout=0.5, wrap=wrap))
        after.append(torch.rand(3))
    assert torch.equal(after[0], after[1])


def test_a_default_device_is_replayed():
    module = region(lambda m, x: (x * torch.ones(4).to(x.device) * m.weight).sum())
    with torch.device("cpu"):
        loss = module(leaf())
    with torch.device("meta"):
        loss.backward()
    assert module.weight.grad is not None
