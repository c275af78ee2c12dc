"""What a checkpointed region refuses: higher derivatives, writes in place to what
backward needs, forwards that differ, second policies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide import ActivationPolicy, checkpoint
from support.regions import Call, leaf, region


def test_create_graph_raises_by_name():
    x = leaf()
    loss = region(lambda m, x: (x * m.weight).sin().sum())(x)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(loss, x, create_graph=True)
    assert str(error.value).startswith(
        "lowtide: checkpoint(Call): expected create_graph=False through a checkpointed "
        "region, got create_graph=True. Take higher derivatives of a model without "
        "lowtide.checkpoint."
    )


def test_an_argument_written_to_in_the_forward():
    module = region(lambda m, x: x.mul_(2).sin().sum())
    with pytest.raises(RuntimeError) as error:
        module(leaf() * 1.0)
    assert str(error.value).startswith(
        "lowtide: checkpoint(Call): expected tensor argument 0 at version 0, as the "
        "forward received it, got version 1: something wrote to it in place."
    )


@pytest.mark.parametrize("policy", [{}, {"offload": ["input"]}], ids=str)
def test_an_argument_written_to_after_the_forward(policy: dict[str, list[str]]):
    module = checkpoint(
        Call(lambda m, x: (x * m.weight).sin().sum()), ActivationPolicy(**policy)
    )
    x = leaf() * 1.0
    loss = module(x)
    x.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="argument 0 at version 0.*got version 1"):
        loss.backward()


def test_a_saved_value_written_to_after_it_was_saved():
    def forward(m, x):
        y = (x * m.weight).exp()
        z = y.sin()
        y.mul_(2)
        return z.sum()

    loss = region(forward)(leaf())
    with pytest.raises(RuntimeError, match=r"saved as number \d at version 0.*place"):
        loss.backward()


def test_a_forward_that_differs_the_second_time():
    sizes = [4, 3]

    def forward(m, x):
        return (x * m.weight)[: sizes.pop(0)].sin().sum()

    loss = region(forward)(leaf())
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    text = str(error.value)
    assert "expected the second forward to do what the first did, saved tensor" in text
    assert "Float[4], got Float[3]" in text


def test_a_forward_that_saves_less_the_second_time():
    steps = [3, 1]

    def forward(m, x):
        y = x * m.weight
        for _ in range(steps.pop(0)):
            y = y.sin()
        return y.sum()

    loss = region(forward)(leaf())
    with pytest.raises(RuntimeError, match="at least 5 saved tensors, got 3"):
        loss.backward()


def test_a_second_policy_raises():
    module = checkpoint(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="lowtide: ") as error:
        checkpoint(module, ActivationPolicy(offload=["input"]))
    assert str(error.value) == (
        "lowtide: checkpoint: expected a module without a policy, got "
        "CheckpointedLinear, which has one. Put all names into one ActivationPolicy."
    )


def test_containers_without_a_forward_raise():
    with pytest.raises(ValueError, match="lowtide: ") as error:
        checkpoint(nn.ModuleList([nn.Linear(4, 4)]))
    assert str(error.value) == (
        "lowtide: checkpoint: expected a module with a forward, got ModuleList. Call "
        "it on the modules inside."
    )
