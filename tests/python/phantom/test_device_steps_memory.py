"""Parameters, gradients and states on the host, by category, that an optimizer steps on
the device: what is ever there, and where all is after loads, dry."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowtide
from lowtide._sharding.device_steps import DeviceSteps, device_steps_of
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry

DIM, WORLD, BLOCKS = 2048, 8, 8
UNIT = 4 * DIM * DIM // WORLD  # bytes of its sharded parameters
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
# Where states are; None: all is on the device.
WAYS: dict[str, Any] = {"device": None, "all": "host", "parameters": "device"}


def steps() -> dict[str, dict[str, int]]:
    dist.init_process_group("nccl")
    found = {way: steps_of(way) for way in WAYS}
    return found | {f"{way}, in backward": steps_of(way, True) for way in WAYS}


def made(way: str, in_backward: bool, **settings: Any) -> tuple[Any, Any]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model: Any = nn.Sequential(
            *(nn.Linear(DIM, DIM, bias=False) for _ in range(BLOCKS))
        )
    policy = None if WAYS[way] is None else lowtide.CPUOffloadPolicy()
    for unit in (*model, model):
        lowtide.fully_shard(unit, mesh=mesh, mp_policy=POLICY, offload_policy=policy)
    model.to_empty(device="cuda" if policy is None else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    if policy is not None:
        lowtide.step_on_device(optimizer, states=WAYS[way])
    if in_backward:
        lowtide.optimize_in_backward(model, optimizer)
    return model, optimizer


def one_step(model: Any, optimizer: Any) -> None:
    x = torch.zeros(16, DIM, device="cuda")
    model(x).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def steps_of(way: str, in_backward: bool = False) -> dict[str, int]:
    """Bytes on the device: the most in steps, that in a step's end, and between."""
    gc.collect()  # what is left of models before would go meanwhile
    before = torch.cuda.memory_allocated()
    model, optimizer = made(way, in_backward, fused=True)
    one_step(model, optimizer)
    torch.cuda.reset_peak_memory_stats()
    one_step(model, optimizer)
    return {
        "most": torch.cuda.max_memory_allocated() - before,
        "between": torch.cuda.memory_allocated() - before,
    }


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_what_is_on_the_host_is_there_two_units_at_a_time():
    found = call_dry(steps, machine=Machine(world=WORLD))
    parameters, states = BLOCKS * UNIT, 2 * BLOCKS * UNIT
    slack = UNIT // 2
    for when in ("", ", in backward"):
        here, none, some = (found[f"{way}{when}"] for way in WAYS)
        assert here["between"] >= parameters + states
        assert none["between"] <= slack
        assert states <= some["between"] <= states + slack
        # A parameter, its gradient and two states.
        assert none["most"] <= here["most"] - parameters - states + 2 * 4 * UNIT + slack
        assert some["most"] <= here["most"] - parameters + 2 * 2 * UNIT + slack


def behind_a_backward() -> None:
    """Whether copies were on their way at a backward's end, and have arrived behind
    it."""
    dist.init_process_group("nccl")
    seen: list[bool] = []
    settle = DeviceSteps.settle

    def noted(steps: DeviceSteps) -> None:
        seen.append(not steps.is_settled)
        settle(steps)

    DeviceSteps.settle = noted  # type: ignore[method-assign]
    for way in ("all", "parameters"):
        model, optimizer = made(way, True, fused=True)
        seen.clear()
        model(torch.zeros(16, DIM, device="cuda")).float().sum().backward()
        steps = device_steps_of(optimizer)
        assert steps is not None
        seen.append(steps.is_settled)
        assert seen == [True, True], (way, seen)
        optimizer.step()


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_parameters_are_there_when_a_backward_is_over():
    """A forward may read them before `optimizer.step()`."""
    call_dry(behind_a_backward, machine=Machine(world=WORLD))


def through_loads(way: str, settings: dict[str, Any]) -> list[str]:
    """Where a parameter, its moment and its counter are after each."""
    dist.init_process_group("nccl")
    model, optimizer = made(way, False, **settings)
    first = next(iter(model.parameters()))

    def places() -> str:
        state = optimizer.state[first]
        of_all = first, state["exp_avg"], state["step"]
        return " ".join(each.device.type for each in of_all)

    one_step(model, optimizer)
    found = [places()]
    for p in model.parameters():  # as `lowtide.load` does, where its parameter is
        state = optimizer.state[p]
        state["exp_avg"] = torch.zeros_like(p)
        state["step"] = state["step"].cpu()
    one_step(model, optimizer)
    found.append(places())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found.append(places())
    one_step(model, optimizer)
    lowtide.sleep(model, optimizer)
    lowtide.wake(model, optimizer)
    one_step(model, optimizer)
    found.append(places())
    return found


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
@pytest.mark.parametrize("way", ["all", "parameters"])
@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}], ids=str)
def test_all_is_where_it_was_after_loads(way, settings):
    seen = call_dry(through_loads, way, settings)
    counter = "cuda" if "fused" in settings else "cpu"
    moment = "cpu" if way == "all" else "cuda"
    assert seen == [f"cpu {moment} {counter}"] * 4
