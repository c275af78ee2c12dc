"""`Tensor.record_stream` of what lowtide leases, dry: bytes that a program dropped are
nobody else's while another stream of its may still read them, as with FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import lowtide
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry

WIDTH = 512
PENDING = "active_pending_free"  # of a block that waits for a stream

RECORDED = (False, True)
Fate = dict[bool, set[str]]  # of bytes, by whether a stream was recorded


def state_at(address: int) -> str:
    """Of the allocator's block."""
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["address"] <= address < block["address"] + block["size"]:
                return str(block["state"])
    return "given back"


def model_by(system: Callable[..., Any], **settings: Any) -> nn.Sequential:
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for unit in (*model, model):
        system(unit, **settings)
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(4, WIDTH, device="cuda")).sum().backward()


def of_gradients(system: Any, recorded: bool) -> set[str]:
    model = model_by(system)
    backward(model)
    side = torch.cuda.Stream()
    addresses = []
    for p in model.parameters():
        local = p.grad.to_local()
        addresses.append(local.data_ptr())
        if recorded:
            local.record_stream(side)
        del local
        p.grad = None
    return {*map(state_at, addresses)}


def of_gradients_in_hooks(system: Any, recorded: bool) -> set[str]:
    """As trainers take them to the host, each as soon as it is there."""
    model = model_by(system)
    side = torch.cuda.Stream()
    addresses, states = [], set()

    def to_host(p: Any) -> None:
        local = p.grad.to_local()
        addresses.append(local.data_ptr())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            local.to("cpu", non_blocking=True)
        if recorded:
            local.record_stream(side)
        del local
        p.grad = None
        states.update(map(state_at, addresses))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(to_host)
    backward(model)
    assert len(addresses) == 4
    return states & {PENDING}  # others are other things, too, by now


def of_gathered(system: Any, recorded: bool, **settings: Any) -> set[str]:
    model = model_by(system, **settings)
    backward(model)
    side = torch.cuda.Stream()
    addresses = []
    for unit in model:
        unit.unshard()
        for p in (unit.weight, unit.bias):
            addresses.append(p.data_ptr())
            if recorded:
                p.record_stream(side)
    for unit in model:
        unit.reshard()
    return {*map(state_at, addresses)}


def of_gathered_in_place(system: Any, recorded: bool) -> set[str]:
    """Split along the other dimension, whose places are buffers of their own."""

    def columns(p: Any) -> Shard | None:
        return Shard(1) if p.dim() == 2 else None

    return of_gathered(system, recorded, shard_placement_fn=columns)


def of_shards(system: Any, recorded: bool) -> set[str]:
    model = model_by(system)
    side = torch.cuda.Stream()
    addresses = []
    for p in model.parameters():
        local = p.to_local()
        addresses.append(local.data_ptr())
        if recorded:
            local.record_stream(side)
        del local, p
    del model
    gc.collect()
    return {*map(state_at, addresses)}


CASES = (
    *(of_gradients, of_gradients_in_hooks, of_gathered, of_gathered_in_place),
    of_shards,
)


def fates() -> dict[str, dict[str, Fate]]:
    dist.init_process_group("nccl")
    return {
        system.__module__.partition(".")[0]: {
            case.__name__: {recorded: case(system, recorded) for recorded in RECORDED}
            for case in CASES
        }
        for system in (fully_shard, lowtide.fully_shard)
    }


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_bytes_wait_for_the_stream_as_with_fsdp2():
    fates_by = call_dry(fates, machine=Machine(world=2))
    ours = fates_by["lowtide"]
    # FSDP2 keeps all of them until the hooks of the last have run.
    assert ours.pop("of_gradients_in_hooks") == {False: set(), True: {PENDING}}
    assert fates_by["torch"].pop("of_gradients_in_hooks")
    assert ours == fates_by["torch"]
    assert all(fate[True] == {PENDING} for fate in ours.values()), ours
    assert not any(PENDING in fate[False] for fate in ours.values()), ours
