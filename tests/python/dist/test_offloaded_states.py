"""States, parameters and gradients on the host, by category: the bits of all on the
device, wherever the step runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import lowtide
from lowtide._sharding.device_steps import DeviceSteps
from support.bits import assert_same_tensors
from support.model import TINY, build
from support.systems import get_system
from support.training import Run, accumulate, local, shard

RUN = Run(TINY, 2, microbatches=2, sync="last")
Made = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[..., Made]] = {
    "adam amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
}


def moments(model: nn.Module, optimizer: Made) -> dict[str, Any]:
    return {
        f"{name} {key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if value is not None
    }


def everything(model: nn.Module, optimizer: Made) -> dict[str, Any]:
    states = {name: local(v).clone() for name, v in moments(model, optimizer).items()}
    return states | {name: local(p).clone() for name, p in model.named_parameters()}


# What is on the host: in backward gradients are not kept anywhere.
STATES_ON_HOST = ("states", "states, in backward", "all", "all, in backward")
WAYS = (*STATES_ON_HOST, "parameters and gradients", "parameters, in backward")


def made(name: str, way: str) -> tuple[Any, Made]:
    """Two groups; ``way``: of WAYS, or device."""
    torch.manual_seed(0)
    offloads = way.startswith(("all", "parameters"))
    policy = lowtide.CPUOffloadPolicy() if offloads else None
    lowtides = get_system("lowtide")
    model: Any = shard(build(RUN.model), RUN, lowtides, offload_policy=policy)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = OPTIMIZERS[name](groups)
    if way.endswith("in backward"):
        lowtide.optimize_in_backward(model, optimizer)
    if way.startswith("states"):
        lowtide.offload_states(optimizer)
    elif way != "device":
        where: Any = "host" if way in STATES_ON_HOST else "device"
        lowtide.step_on_device(optimizer, states=where)
        lowtide.step_on_device(optimizer, states=where)  # as it is
    return model, optimizer


def train(name: str, way: str) -> Any:
    """Three steps, states out and in again, two more; which bytes the states are in."""
    model, optimizer = made(name, way)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    found, places = [], []
    for step in range(5):
        accumulate(model, RUN, step, 0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(everything(model, optimizer))
        long = [v for v in moments(model, optimizer).values() if v.dim() > 0]
        assert all(isinstance(value, DTensor) for value in long)
        places.append({local(value).data_ptr() for value in long} - {0})
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return found, places


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_has_the_bits_of_all_on_the_device(pool_of, name, way):
    pool = pool_of(2)
    ours, theirs = pool.run(train, name, way), pool.run(train, name, "device")
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        # Loaded ones too, which elsewhere are other tensors.
        assert (one[1] == [one[1][0]] * 5) == (way in STATES_ON_HOST)
        assert other[1] != [other[1][0]] * 5
        for step, (actual, expected) in enumerate(zip(one[0], other[0], strict=True)):
            assert_same_tensors(actual, expected, f"rank {rank}, step {step}")


def scaled(way: str) -> list[dict[str, torch.Tensor]]:
    """By torch's scaler, whose scale a fused step takes out of the gradients; of one
    step they are infinite on rank 1."""
    model, optimizer = made("adamw fused", way)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    found = []
    for step in range(3):
        x = torch.full((2, 4), step + 1, dtype=torch.int64)
        loss = scaler.scale(model(x).float().square().mean())
        by = float("inf") if step == dist.get_rank() == 1 else 1.0
        (loss * by).backward()
        scaler.step(optimizer)
        scaler.update()
        gradients = {
            f"{name} gradient": local(p.grad).clone()
            for name, p in model.named_parameters()
        }
        found.append(everything(model, optimizer) | gradients)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("way", ["states", "all", "parameters and gradients"])
def test_a_scaled_step_leaves_what_it_leaves_on_the_device(pool_of, way):
    pool = pool_of(2)
    for ours, theirs in zip(
        pool.run(scaled, way), pool.run(scaled, "device"), strict=True
    ):
        for step, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_tensors(actual, expected, f"step {step}")


def compiled(way: str) -> list[dict[str, torch.Tensor]]:
    """A step inside compiled code, which leaves it as it is."""
    model, optimizer = made("sgd", way)
    if way == "device":
        step: Callable[[], Any] = optimizer.step
    else:
        step = torch.compile(lambda: optimizer.step(), backend="eager")
    found = []
    for number in range(3):
        accumulate(model, RUN, number, 0)
        with steps_that_are_ours() as ours:
            step()
        assert bool(ours) == (way != "device")
        optimizer.zero_grad()
        found.append(everything(model, optimizer))
    return found


@contextmanager
def steps_that_are_ours() -> Iterator[list[Any]]:
    """Of what is on the host, copied to the device."""
    seen: list[Any] = []
    stand_in = DeviceSteps.stand_in

    def noted(steps: DeviceSteps, known: Any) -> Any:
        seen.append(steps)
        return stand_in(steps, known)

    DeviceSteps.stand_in = noted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        DeviceSteps.stand_in = stand_in  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["states", "all", "parameters and gradients"])
def test_a_step_inside_compiled_code_is_the_same(pool_of, way):
    pool = pool_of(2)
    for ours, theirs in zip(
        pool.run(compiled, way), pool.run(compiled, "device"), strict=True
    ):
        for step, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_tensors(actual, expected, f"step {step}")


def lose_a_step(way: str) -> list[bool]:
    """In the last unit's step, the others' states on their way out."""
    model, optimizer = made("adamw fused", way)
    accumulate(model, RUN, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = everything(model, optimizer)
    last = optimizer.param_groups[-1]["params"][-1]
    accumulate(model, RUN, 1, 0)
    last.grad = torch.zeros_like(last)
    last.grad._local_tensor = last.grad._local_tensor.bool()
    raised = False
    try:
        with lowtide.step(model, optimizer):
            optimizer.step()
    except RuntimeError:
        raised = True
    after = everything(model, optimizer)
    optimizer.zero_grad()
    same = all(torch.equal(after[name], value) for name, value in before.items())
    accumulate(model, RUN, 1, 0)
    optimizer.step()
    again = everything(model, optimizer)
    other, its = made("adamw fused", "device")
    for step in range(2):
        accumulate(other, RUN, step, 0)
        its.step()
        its.zero_grad()
    expected = everything(other, its)
    return [raised, same, all(torch.equal(again[n], expected[n]) for n in expected)]


@pytest.mark.parametrize("way", ["states", "all", "parameters and gradients"])
def test_a_step_that_raises_is_undone(pool_of, way):
    assert pool_of(2).run(lose_a_step, way) == [[True] * 3] * 2


def with_the_rest(folder: Path) -> list[bool]:
    """A nap, a checkpoint of lowtide's and one of torch's, and a unit whose rows are
    all another rank's; by what is on the host."""
    found = []
    ways = ("device", "states", "all", "parameters and gradients")
    for way in ways:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4))
        policy = lowtide.CPUOffloadPolicy() if ways.index(way) > 1 else None
        for module in (*model, model):
            lowtide.fully_shard(module, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if way == "states":
            lowtide.offload_states(optimizer)
        elif way != "device":
            where: Any = "host" if way == "all" else "device"
            lowtide.step_on_device(optimizer, states=where)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        lowtide.save(folder / way, model, optimizer)
        step()
        lowtide.sleep(model, optimizer)
        lowtide.wake(model, optimizer)
        lowtide.load(folder / way, model, optimizer)
        step()
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
        step()
        found.append(everything(model, optimizer))
    here = found.pop(0)
    return [all(torch.equal(here[n], there[n]) for n in here) for there in found]


def test_naps_and_checkpoints_take_them(pool_of, tmp_path):
    assert pool_of(2).run(with_the_rest, tmp_path) == [[True] * 3] * 2


def refused() -> list[str]:
    lowtides = get_system("lowtide")
    model: Any = shard(build(RUN.model), RUN, lowtides)
    policy = lowtide.CPUOffloadPolicy()
    there: Any = shard(build(RUN.model), RUN, lowtides, offload_policy=policy)
    in_two_ways = torch.optim.SGD(there.parameters())
    lowtide.step_on_device(in_two_ways, states="device")
    found = []
    calls: list[tuple[Callable[..., None], Made, dict[str, Any]]] = [
        (lowtide.offload_states, torch.optim.LBFGS([model.head.weight]), {}),
        (lowtide.offload_states, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), {}),
        (lowtide.step_on_device, torch.optim.SGD(model.parameters()), {}),
        (lowtide.step_on_device, in_two_ways, {"states": "host"}),
        (lowtide.step_on_device, in_two_ways, {"states": "there"}),
    ]
    for function, optimizer, settings in calls:
        try:
            function(optimizer, **settings)
        except ValueError as error:
            found.append(str(error).split(". ")[0])
    return found


def step_of_a_patched_class() -> list[Any]:
    """Of a class whose step somebody has replaced: nothing is stepped."""
    model, optimizer = made("sgd", "states")
    accumulate(model, RUN, 0, 0)
    before = everything(model, optimizer)
    kind: Any = torch.optim.SGD
    theirs, said = kind.step, ""
    kind.step = lambda self, closure=None: theirs(self, closure)
    try:
        optimizer.step()
    except RuntimeError as error:
        said = str(error).split(". ")[0]
    finally:
        kind.step = theirs
    after = everything(model, optimizer)
    return [said, all(map(torch.equal, after.values(), before.values()))]


def test_a_class_with_another_step_is_refused(pool_of):
    said = (
        "lowtide: SGD: expected the class's own step for what is on the host, got "
        "another function in its place"
    )
    assert pool_of(2).run(step_of_a_patched_class) == [[said, True]] * 2


def test_others_are_refused_by_name(pool_of):
    assert pool_of(2).run(refused) == 2 * [
        [
            "lowtide: offload_states: expected an elementwise optimizer of torch."
            "optim, got LBFGS",
            "lowtide: offload_states: expected an optimizer of a model's sharded "
            "parameters, got SGD with none of them",
            "lowtide: step_on_device: expected parameters that CPUOffloadPolicy has on "
            f"the host, got none among {len([*build(RUN.model).parameters()])}",
            "lowtide: step_on_device: expected one call for an optimizer, got another, "
            "of other states, or offload_states before",
            "lowtide: step_on_device: expected states to be 'host' or 'device', got "
            "'there'",
        ]
    ]
