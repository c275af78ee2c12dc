"""Where an optimizer's states lie, dry: with expandable segments in a pool of their
own, which is given back with them."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide._torch_version import VERSION
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry

WORLD, WIDTH, LAYERS = 2, 4096, 6
SHARDS = 4 * LAYERS * WIDTH * WIDTH // WORLD  # bytes of the parameters here
GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ORDINARY = (0, 0)
MIB = 1 << 20


def sharded(width: int) -> nn.Sequential:
    with torch.device("meta"):
        layers = (nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        model = nn.Sequential(*layers)
    for unit in (*model, model):
        lowtide.fully_shard(unit)
    model.to_empty(device="cuda")
    return model


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    width = model[0].in_features
    for _ in range(steps):
        model(torch.zeros(1, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def pools_of(optimizer: torch.optim.Optimizer) -> set[tuple[int, int]]:
    """Of its states, but for those of one element."""
    rows = [
        getattr(value, "_local_tensor", value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    found = set()
    for segment in torch.cuda.memory_snapshot():
        first, end = segment["address"], segment["address"] + segment["total_size"]
        if any(first <= each.data_ptr() < end for each in rows):
            found.add(tuple(segment["segment_pool_id"]))
    return found


def holes() -> list[int]:
    """Bytes of the free blocks in memory that is not apart, largest first."""
    segments = torch.cuda.memory_snapshot()
    of_all = [s for s in segments if tuple(s["segment_pool_id"]) == ORDINARY]
    blocks = [block for segment in of_all for block in segment["blocks"]]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    return sorted(free, reverse=True)


def apart() -> int:
    """Bytes reserved in pools."""
    segments = torch.cuda.memory_snapshot()
    of_pools = [s for s in segments if tuple(s["segment_pool_id"]) != ORDINARY]
    return sum(segment["total_size"] for segment in of_pools)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), fused=True)


def foreach(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), foreach=True)


def local(model: nn.Module) -> Any:
    return torch.optim.AdamW(lowtide.local_parameters(model), fused=True)


def in_backward(model: nn.Module) -> Any:
    return lowtide.optimize_in_backward(model, adamw(model))


def momentum(model: nn.Module) -> Any:
    """Its state is made elsewhere in torch."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MAKERS = (adamw, foreach, local, in_backward, momentum)


def found() -> dict[str, Any]:
    dist.init_process_group("nccl")
    pools = {}
    for maker in MAKERS:
        model = sharded(WIDTH)
        optimizer = maker(model)
        train(model, optimizer)
        pools[maker.__name__] = pools_of(optimizer)
        if maker is adamw:
            free = holes()
            before = torch.cuda.memory_reserved()
            pools["loaded"] = loaded_anew(optimizer)
            more = torch.cuda.memory_reserved() - before
        del model, optimizer
        gc.collect()
    small = sharded(64)
    optimizer = adamw(small)
    train(small, optimizer)
    pools["small"] = pools_of(optimizer)
    on_host = adamw(model := sharded(WIDTH))
    lowtide.offload_states(on_host)
    torch.cuda.empty_cache()
    assert apart() == 0
    train(model, on_host)
    return {
        **{"features": beside_other_features()},
        **{"pools": pools, "holes": free, "given back": given_back()},
        **{"more when loaded": more, "apart with states on the host": apart()},
    }


def loaded_anew(optimizer: torch.optim.Optimizer) -> set[tuple[int, int]]:
    copies = {
        number: {name: value.clone() for name, value in state.items()}
        for number, state in optimizer.state_dict()["state"].items()
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": copies})
    return pools_of(optimizer)


class Interrupted(Exception):
    pass


def beside_other_features() -> dict[str, Any]:
    """A first step that is undone, sleep, and steps on."""
    model = sharded(WIDTH)
    optimizer = adamw(model)
    with contextlib.suppress(Interrupted), lowtide.step(model, optimizer):
        train(model, optimizer, 1)
        raise Interrupted
    undone = len(optimizer.state)
    train(model, optimizer)
    torch.cuda.empty_cache()
    awake = torch.cuda.memory_reserved()
    lowtide.sleep(model, optimizer)
    lent = awake - torch.cuda.memory_reserved()
    asleep = apart()
    lowtide.wake(model, optimizer)
    train(model, optimizer)
    return {"undone": undone, "asleep": asleep, "lent": lent}


def given_back() -> int:
    """Of what an optimizer reserved, once its states are gone."""
    model = sharded(WIDTH)
    optimizer = adamw(model)
    train(model, optimizer)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    optimizer.state.clear()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved()


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_states_lie_apart_where_segments_grow():
    run = call_dry(found, machine=Machine(world=WORLD), environment=GROWING)
    pools = run["pools"]
    for name in ("adamw", "foreach", "local", "in_backward"):
        (pool,) = pools[name]
        assert pool != ORDINARY, name
    assert {name for name, of in pools.items() if of == {ORDINARY}} == {
        *("loaded", "small", "momentum")
    }
    # Where gradients were, nothing is between two of them; the rest is a shard's, which
    # were made one by one.
    assert run["holes"][0] >= SHARDS
    if VERSION >= (2, 15):  # before, workspaces of cuBLAS stay there
        assert sum(run["holes"][1:]) <= SHARDS // LAYERS + 4 * MIB
    assert run["given back"] >= 2 * SHARDS
    assert run["more when loaded"] <= -2 * SHARDS
    assert run["apart with states on the host"] == 0
    features = run["features"]
    assert features["undone"] == features["asleep"] == 0, features
    assert features["lent"] >= 3 * SHARDS, features


@pytest.mark.slow
@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_default_segments_are_torchs():
    run = call_dry(found, machine=Machine(world=WORLD))
    assert set(map(frozenset, run["pools"].values())) == {frozenset({ORDINARY})}
    assert run["given back"] >= 2 * SHARDS
