"""Bytes of lowtide's that a program dropped, dry: they are nobody else's while another
stream (`Tensor.record_stream`) or process may still read them, as with FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import reduce_tensor

import lowtide
import lowtide.phantom
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry

WIDTH = 512
PENDING = "active_pending_free"  # of a block that waits for a stream
IN_USE = "active_allocated"

READ = (False, True)
Fate = dict[bool, set[str]]  # of bytes, by whether they are read elsewhere


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


def of_gathered_sent(system: Any, sent: bool) -> set[str]:
    """To another process, which has not let go."""
    model = model_by(system)
    backward(model)
    model[0].unshard()
    weight = model[0].weight.detach()
    address = weight.data_ptr()
    if sent:
        reduce_tensor(weight)
    del weight
    model[0].reshard()
    return {state_at(address)}


KEPT = {
    of_gradients: PENDING,
    of_gradients_in_hooks: PENDING,
    of_gathered: PENDING,
    of_gathered_in_place: PENDING,
    of_shards: PENDING,
    of_gathered_sent: IN_USE,
}


def fates() -> list[dict[str, Fate]]:
    dist.init_process_group("nccl")
    return [
        {case.__name__: {read: case(system, read) for read in READ} for case in KEPT}
        for system in (fully_shard, lowtide.fully_shard)
    ]


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_bytes_are_kept_for_who_reads_them_as_with_fsdp2():
    theirs, ours = call_dry(fates, machine=Machine(world=2))
    for case, kept in KEPT.items():
        assert ours[case.__name__][True] == {kept}, case
        assert kept not in ours[case.__name__][False], case
    # FSDP2 keeps all of them until the hooks of the last have run.
    assert theirs.pop("of_gradients_in_hooks") != ours.pop("of_gradients_in_hooks")
    assert ours == theirs


# -- gradients on the host, which a stream copies to the device ------------------------


def each_to_device(gradients: list[Any]) -> None:
    for gradient in gradients:
        gradient.to("cuda", non_blocking=True)


def all_to_device(gradients: list[Any]) -> None:
    local = [gradient.to_local() for gradient in gradients]
    there = [torch.empty_like(gradient, device="cuda") for gradient in local]
    torch._foreach_copy_(there, local, non_blocking=True)


COPIES = {None: lambda gradients: None, "each": each_to_device, "all": all_to_device}


def of_gradients_on_the_host(system: Any, copy: str | None) -> tuple[bool, bool]:
    """Whether later gradients had bytes of theirs, and whether they came to the host
    behind what the other stream had to do."""
    model = model_by(system, offload_policy=CPUOffloadPolicy())
    backward(model)
    addresses = {p.grad.to_local().data_ptr() for p in model.parameters()}
    side = torch.cuda.Stream()
    busy = torch.empty(8192, 8192, device="cuda")
    behind, then = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with lowtide.phantom.timeline("h100"):
        with torch.cuda.stream(side):
            for _ in range(8):
                busy.fill_(0)
            COPIES[copy]([p.grad for p in model.parameters()])
            behind.record()
        model.zero_grad()
        backward(model)
        then.record()
        torch.cuda.synchronize()
        later = {p.grad.to_local().data_ptr() for p in model.parameters()}
        return bool(addresses & later), behind.elapsed_time(then) >= 0


def fates_on_the_host() -> list[dict[str | None, tuple[bool, bool]]]:
    dist.init_process_group("nccl")
    return [
        {copy: of_gradients_on_the_host(system, copy) for copy in COPIES}
        for system in (fully_shard, lowtide.fully_shard)
    ]


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_gradients_on_the_host_are_overwritten_behind_who_copies_them():
    theirs, ours = call_dry(
        fates_on_the_host, machine=Machine(world=2, events="at_sync")
    )
    behind = (True, True)
    assert ours == {None: (True, False), "each": behind, "all": behind}
    assert (True, False) not in (theirs["each"], theirs["all"])
