"""What raises by name: names that match or store nothing, policies that cannot be."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import Tensor, nn

from lowtide import ActivationPolicy, checkpoint, tag
from support.blocks import DIM, rows, stack, step

LAYERS = 4


def wrapped(**policy) -> nn.Sequential:
    return stack(LAYERS, wrap=lambda m: checkpoint(m, ActivationPolicy(**policy)))


def refused(forward, name: str = "value", **policy) -> str:
    """The reason in the error after the first backward."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(DIM, 3 * DIM)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.up(x))

    module = checkpoint(Module(), ActivationPolicy(**(policy or {"save": [name]})))
    with pytest.raises(ValueError, match="lowtide: ") as error:
        module(rows().requires_grad_() * 1.0).sum().backward()
    return str(error.value)


def test_an_operator_with_several_large_outputs_is_refused_by_name():
    def forward(h: Tensor) -> Tensor:
        values, indices = h.sort()
        return tag(values, "value").sin() * indices

    assert "got 0 bytes: 1 x aten.sort.default returns several values" in refused(
        forward
    )


def test_a_value_written_to_after_it_was_produced_is_refused():
    def forward(h: Tensor) -> Tensor:
        return tag((h * 2).relu_(), "value").sin()

    assert "got 0 bytes: 1 x written to after aten.mul.Tensor made it" in refused(
        forward
    )


class NamesAndWrites(nn.Module):
    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.up, self.inside = nn.Linear(DIM, DIM), inside

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = tag(self.up(x) * 2, "value")
        z = (y + 1).sin()
        return (y.mul_(3) if self.inside else y), z


def test_a_value_written_to_after_it_was_named_raises():
    module = checkpoint(NamesAndWrites(inside=True), ActivationPolicy(save=["value"]))
    with pytest.raises(RuntimeError) as error:
        module(rows().requires_grad_() * 1.0)
    assert str(error.value) == (
        "lowtide: checkpoint(NamesAndWrites): expected 'value' to stay as it was "
        "named, got aten.mul_.Tensor, which writes to it in place. Name the value "
        "after its last change, or write out of place."
    )


def test_a_value_written_to_after_the_forward_raises():
    module = checkpoint(NamesAndWrites(inside=False), ActivationPolicy(save=["value"]))
    y, z = module(rows().requires_grad_() * 1.0)
    y.detach().mul_(3)
    with pytest.raises(RuntimeError) as error:
        z.sum().backward()
    assert str(error.value) == (
        "lowtide: checkpoint(NamesAndWrites): expected 'value' at version 0, as it was "
        "named, got version 1: something wrote to it in place. Name the value after "
        "its last change, or write out of place."
    )


def test_an_unknown_name_raises_with_the_nearest():
    model = wrapped(offload=["residal"])
    with pytest.raises(ValueError, match="lowtide: ") as error:
        step(model)
    # Names that other tests of this process gave may follow.
    assert str(error.value).startswith(
        "lowtide: ActivationPolicy.offload: expected 'residal' to name a value in Mlp, "
        "got none in 4 forward(s). Did you mean 'residual'"
    )


def test_a_name_in_the_recompute_list_must_match_too():
    with pytest.raises(ValueError, match="recompute: expected 'hiden'.*'hidden'"):
        step(wrapped(recompute=["hiden"]))
    step(wrapped(recompute=["hidden"]))


def test_a_pattern_without_a_match_raises_at_once():
    with pytest.raises(ValueError, match="lowtide: ") as error:
        wrapped(offload=["layers.*.mpl"])
    assert str(error.value) == (
        "lowtide: checkpoint(Mlp): expected 'layers.*.mpl' to match a submodule, got "
        "none. Known names: 'down', 'norm', 'up'."
    )


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            {"save": ["a"], "offload": ["a"]},
            "lowtide: ActivationPolicy: expected 'a' in one list, got it in save and "
            "offload. Remove one.",
        ),
        (
            {"save": "hidden"},
            "lowtide: ActivationPolicy.save: expected a list of names, got 'hidden'. "
            "Write save=['residual'].",
        ),
        (
            {"recompute": ["input"]},
            "lowtide: ActivationPolicy.recompute: expected values that the module "
            "computes, got 'input', its arguments. Remove it: arguments are kept, or "
            "offloaded if listed there.",
        ),
        (
            {"prefetch": -1},
            "lowtide: ActivationPolicy.prefetch: expected an integer >= 0, got -1. "
            "Leave it out for the default.",
        ),
    ],
)
def test_impossible_policies_raise(policy: dict, text: str) -> None:
    with pytest.raises(ValueError, match="lowtide: ") as error:
        ActivationPolicy(**policy)
    assert str(error.value) == text


def test_the_reserved_name_can_not_be_given():
    with pytest.raises(ValueError, match="lowtide: ") as error:
        tag(rows(), "input")
    assert str(error.value) == (
        "lowtide: tag: expected a name of yours, got 'input', which means a "
        "checkpointed module's arguments. Choose another."
    )


def test_an_index_above_the_module_is_refused():
    model = nn.ModuleDict({"layers": stack(2)})
    block = model["layers"][0]
    child = next(iter(dict(block.named_children())))
    kind = type(block).__name__
    with pytest.raises(ValueError, match="lowtide: ") as error:
        checkpoint(block, ActivationPolicy(save=[f"layers.0.{child}"]))
    assert str(error.value) == (
        f"lowtide: checkpoint({kind}): expected '*' above the module, got '0' in "
        f"'layers.0.{child}', which would mean every {kind} of this policy. Write "
        f"'layers.*.{child}', or give the one that is meant a policy of its own."
    )
    checkpoint(block, ActivationPolicy(save=[f"layers.*.{child}"]))


def test_an_index_inside_the_module_chooses():
    model = nn.Sequential(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
    checkpoint(model, ActivationPolicy(save=["0.0"]))
    assert [bool(m._forward_hooks) for m in model[0]] == [True, False]


def test_names_are_checked_in_the_first_backward_that_ends():
    """One that raises keeps no module, and the next one is looked at instead."""
    model = wrapped(save=["hiden"])
    places = [weakref.ref(block) for block in model]

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    x = rows().requires_grad_()
    bad = x * 1.0
    bad.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(bad).sum().backward()
    with pytest.raises(ValueError, match="'hiden' to name a value in Mlp"):
        model(x * 1.0).sum().backward()
    model(x * 1.0).sum().backward()  # said once
    del model, bad
    gc.collect()
    assert all(place() is None for place in places)


def test_a_failed_first_backward_lets_its_modules_go():
    model = wrapped(save=["hidden"])
    places = [weakref.ref(block) for block in model]
    bad = rows().requires_grad_() * 1.0
    bad.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(bad).sum().backward()
    del model, bad
    gc.collect()
    assert all(place() is None for place in places)
