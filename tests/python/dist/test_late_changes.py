"""Models changed after `fully_shard` or after a step: what FSDP2 trains keeps its bits,
what both could only ignore is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide._torch_version import VERSION
from support.bits import same_bits
from support.recorder import Recorder, assert_pattern_equals_fsdp2, finish_step
from support.systems import System, get_system

Pattern = Callable[[System, Recorder], None]


def build(system: System, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), nn.Linear(8, 8)
    ).to(dtype)
    for block in model[:2]:
        system.fully_shard(block)
    system.fully_shard(model)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.ones(2, 8, dtype=dtype) * (dist.get_rank() + 1)
    loss: torch.Tensor = model(x).square().mean()
    return loss


def converted_and_back(system: System, record: Recorder) -> None:
    """As for an export between steps, gradients and optimizer states kept."""
    model = build(system)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        loss_of(model).backward()
        model.double()
        model.float()
        loss_of(model).backward()
        finish_step(model, optimizer, record)


def converted_to_what_it_is(system: System, record: Recorder) -> None:
    """Which leaves the gradients that wait for a reduction."""
    model = build(system)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.set_requires_gradient_sync(False)
        loss_of(model).backward()
        model.float().to("cpu")
        model.set_requires_gradient_sync(True)
        loss_of(model).backward()
        finish_step(model, optimizer, record)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (converted_and_back, converted_to_what_it_is)
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_change_equals_fsdp2(pool_of, pattern):
    assert_pattern_equals_fsdp2(pool_of(2), __name__, pattern)


def train_converted(part: str) -> tuple[bool, bool]:
    """Whether a model converted after a step trains as one built from its values, and
    stays so."""
    system = get_system("lowtide")
    model = build(system)
    loss_of(model).backward()
    model.zero_grad()
    whole = part == "model"
    (model if whole else model[0]).double()
    other = build(system)
    (other if whole else other[0]).double()
    for one in (model, other):
        if not whole:
            one[0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
            one[0].register_forward_hook(lambda *args: args[-1].float())
    same = []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    for _ in range(2):
        losses = [loss_of(one) for one in (model, other)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        same.append(same_bits(losses[0].detach(), losses[1].detach()))
    return all(same), model[0][0].weight.dtype == torch.float64


@pytest.mark.parametrize("part", ["model", "unit"])
def test_a_model_converted_after_a_step_trains(pool_of, part):
    assert pool_of(2).run(train_converted, part) == [(True, True)] * 2


def gradients_behind_a_failed_conversion(chosen: bool) -> list[bool]:
    """Whether they are what they were, and added to; FSDP2 2.15 has none any more of
    parameters with a ``grad_dtype``."""
    model = build(get_system("lowtide"))
    model[0].register_buffer("last", torch.ones(1))
    if chosen:
        for p in model.parameters():
            p.grad_dtype = torch.float32

    def first(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("first")

    def between(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 1:
            raise RuntimeError("between")
        return tensor.clone()

    loss_of(model).backward()
    once = [p.grad.full_tensor() for p in model.parameters()]
    facts = []
    for times, fail in enumerate((first, between), start=1):
        with pytest.raises(RuntimeError, match=fail.__name__):
            model._apply(fail)
        for added in (0, 1):
            if added:
                loss_of(model).backward()
            now = [p.grad.full_tensor() for p in model.parameters()]
            same = zip(now, once, strict=True)
            facts += [same_bits(a, b * (times + added)) for a, b in same]
    return facts


@pytest.mark.parametrize("chosen", [False, True])
def test_a_conversion_that_raises_leaves_gradients(pool_of, chosen):
    for facts in pool_of(2).run(gradients_behind_a_failed_conversion, chosen):
        assert len(facts) == 24 and all(facts)


def replace(model: Any) -> None:
    model[0][0].weight = nn.Parameter(torch.ones(8, 8))


def tie(model: Any) -> None:
    model[0][0].weight = model[2].weight


def remove(model: Any) -> None:
    model[0][0].bias = None


def convert(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    model.double()


def call_functionally(model: Any) -> None:
    zeros = {"2.weight": torch.zeros(8, 8)}
    torch.func.functional_call(model, zeros, (torch.ones(2, 8),))


def in_its_place(parameter: str, got: str) -> str:
    return (
        f"ValueError: lowtide: {parameter}: expected the parameter that fully_shard "
        f"left there, got {got} since. Replace, tie or remove a parameter before "
        "fully_shard; to change its values, load a state dict or write to the DTensor "
        "in place."
    )


MISTAKES: dict[Callable[[Any], None], str] = {
    replace: in_its_place("0.0.weight", "another Parameter of shape (8, 8)"),
    tie: in_its_place("0.0.weight", "that of 2.weight, to which it has been tied"),
    remove: in_its_place("0.0.bias", "none"),
    call_functionally: in_its_place("2.weight", "another Tensor of shape (8, 8)"),
    convert: (
        "RuntimeError: lowtide: unit '0': expected parameters to keep dtype, class "
        "and device while gradients accumulate without sync, got others. Convert after "
        "a backward that reduces, or after zero_grad()."
    ),
}


def error_of(mistake: str, system_name: str = "lowtide") -> str:
    model = build(get_system(system_name))
    loss_of(model).backward()
    change = next(one for one in MISTAKES if one.__name__ == mistake)
    try:
        change(model)
        loss_of(model)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("mistake", [one.__name__ for one in MISTAKES])
def test_a_change_after_the_first_forward_is_named(pool_of, mistake):
    expected = next(text for one, text in MISTAKES.items() if one.__name__ == mistake)
    assert pool_of(2).run(error_of, mistake) == [expected] * 2


@pytest.mark.skipif(VERSION < (2, 15), reason="torch 2.15's words")
def test_fsdp2_raises_in_the_next_forward_after_a_conversion_of_such(pool_of):
    for error in pool_of(2).run(error_of, convert.__name__, "fsdp2"):
        assert error.startswith("RuntimeError: Expected out tensor to have dtype")


def add_parameter(model: Any) -> None:
    model[0][0].scale = nn.Parameter(torch.ones(8))


def add_module(model: Any) -> None:
    model[0].append(nn.Sequential())
    model[0][2].append(nn.Linear(8, 8, bias=False))


def add_unit(model: Any) -> None:
    model[0].append(nn.Linear(8, 8))
    lowtide.fully_shard(model[0][2])


def add_frozen(model: Any) -> None:
    model[0][0].scale = nn.Parameter(torch.ones(8), requires_grad=False)


ADDED = {
    add_parameter: ["0.scale"],
    add_module: ["2.0.weight"],
    add_unit: [],
    add_frozen: [],
}


def warnings_of(addition: str, late: bool) -> list[str]:
    model = build(get_system("lowtide"))
    add = next(one for one in ADDED if one.__name__ == addition)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if late:
            loss_of(model).backward()
        add(model)
        for _ in range(2):
            loss_of(model).backward()
    return [str(one.message) for one in caught if "lowtide" in str(one.message)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("addition", [one.__name__ for one in ADDED])
def test_what_nobody_shards_is_said_once(pool_of, addition, late):
    names = next(names for one, names in ADDED.items() if one.__name__ == addition)
    expected = [
        "lowtide: unit '0': expected the parameters that fully_shard found, got "
        f"{name} since. As in FSDP2, every rank trains its own: nothing shards it or "
        "reduces its gradient. Call fully_shard on the module that has it, or pass it "
        "in ignored_params."
        for name in names
    ]
    assert pool_of(2).run(warnings_of, addition, late) == [expected] * 2


def shard_lazy(how: str) -> str:
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(8)), nn.Linear(8, 8))
    shard: Any = lowtide.wrap if how == "wrap" else lowtide.fully_shard
    with pytest.raises(ValueError, match="with shapes") as error:
        shard(model)
    return str(error.value)


@pytest.mark.parametrize("how", ["wrap", "fully_shard"])
def test_a_lazy_module_is_refused_by_path(pool_of, how):
    assert pool_of(1).run(shard_lazy, how) == [
        f"lowtide: {how}: expected parameters with shapes, got 0.0.weight of a "
        "LazyLinear, 0.0.bias of a LazyLinear without. Run a forward with a batch of "
        "the right shape before."
    ]
