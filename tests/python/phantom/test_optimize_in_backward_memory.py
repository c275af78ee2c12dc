"""What an optimizer in backward leaves of sharded gradients on the device, and what of
states on the host is ever there, dry."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowtide
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry

DIM, WORLD, BLOCKS = 2048, 8, 8
UNIT = 4 * DIM * DIM // WORLD  # bytes of its sharded gradients
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HOWS: dict[str, dict[str, Any] | None] = {
    "behind": None,
    "unclipped": {},
    "exact": {"max_norm": 1.0},
    "late": {"max_norm": 1.0, "clip": "late"},
}
ON_HOST = ("behind", "unclipped")  # also with states on the host


def steps() -> dict[str, dict[str, int]]:
    dist.init_process_group("nccl")
    found = {name: steps_of(how) for name, how in HOWS.items()}
    return found | {f"{name}, host": steps_of(HOWS[name], True) for name in ON_HOST}


def steps_of(how: dict[str, Any] | None, on_host: bool = False) -> dict[str, int]:
    """Bytes of a steady step: what its backward leaves on the device, its sharded
    gradients at their peak, and what its ``step()`` has beyond what is there before;
    the most of all steps, and what is there between them."""
    gc.collect()  # what is left of models before would go meanwhile
    mesh = init_device_mesh("cuda", (WORLD,))
    with torch.device("meta"):
        model: Any = nn.Sequential(
            *(nn.Linear(DIM, DIM, bias=False) for _ in range(BLOCKS))
        )
    for unit in (*model, model):
        lowtide.fully_shard(unit, mesh=mesh, mp_policy=POLICY)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if on_host:
        lowtide.offload_states(optimizer)
    if how is not None:
        lowtide.optimize_in_backward(model, optimizer, **how)
    x = torch.zeros(16, DIM, device="cuda")
    allocated = torch.cuda.memory_allocated
    most = 0
    for _ in range(3):
        loss = model(x).float().sum()
        before = allocated()
        lowtide.memory_report(model, reset_peaks=True)
        loss.backward()
        del loss
        rows = lowtide.memory_report(model).categories
        found = {
            "left": allocated() - before,
            "sharded gradients": rows["sharded_gradients"].peak,
        }
        most = max(most, torch.cuda.max_memory_allocated())
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        found["step"] = torch.cuda.max_memory_allocated() - before
        most = max(most, torch.cuda.max_memory_allocated())
        optimizer.zero_grad()
    return found | {"most": most, "between": allocated()}


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_gradients_are_not_there_whole():
    found = call_dry(steps, machine=Machine(world=WORLD))
    behind = found["behind"]
    slack = UNIT // 2  # norms, and what a loss holds
    assert behind["left"] > BLOCKS * UNIT - slack
    assert behind["sharded gradients"] >= BLOCKS * UNIT
    for how in ("unclipped", "exact", "late"):
        assert found[how]["left"] < slack, how
        assert found[how]["sharded gradients"] < 3 * UNIT, how
    assert found["unclipped"]["step"] < slack
    assert found["late"]["step"] < slack
    assert UNIT <= found["exact"]["step"] < 2 * UNIT + slack


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_states_on_the_host_are_there_two_units_at_a_time():
    found = call_dry(steps, machine=Machine(world=WORLD))
    for how in ON_HOST:
        here, there = found[how], found[f"{how}, host"]
        states = 2 * BLOCKS * UNIT  # Adam's two moments
        assert here["between"] - there["between"] >= states - UNIT // 8
        at_once = 2 * 2 * UNIT  # also in the first step, which makes them
        assert there["most"] <= here["most"] - states + at_once + UNIT // 2
        assert there["step"] <= (at_once if how == "behind" else 0) + UNIT // 2
