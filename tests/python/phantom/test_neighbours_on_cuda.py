"""Neighbours of a unit step as one tensor, dry: where segments grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry

WIDTH, LAYERS = 512, 3
GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Stepped(TorchDispatchMode):
    """How many tensors AdamW's kernels took."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (
            torch.ops.aten._fused_adamw_.default,
            torch.ops.aten._foreach_addcdiv_.ScalarList,
        ):
            self.tensors += len(args[0])
        return func(*args, **(kwargs or {}))


def sharded() -> nn.Sequential:
    with torch.device("cuda"):
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            for _ in range(LAYERS)
        ]
    model = nn.Sequential(*blocks)
    for unit in (*model, model):
        lowtide.fully_shard(unit)
    return model


def backward(model: nn.Module) -> None:
    model(torch.zeros(1, WIDTH, device="cuda")).sum().backward()


def found() -> dict[str, Any]:
    dist.init_process_group("nccl")
    tensors = {}
    for variant in ("fused", "foreach"):
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), **{variant: True})
        for _ in range(2):
            backward(model)
            with Stepped() as stepped:
                optimizer.step()
            optimizer.zero_grad()
        tensors[variant] = stepped.tensors
        for p in model.parameters():
            state = optimizer.state[p]
            assert isinstance(state["exp_avg"], DTensor)
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == p.shape
            assert state["step"].dim() == 0
    return {"tensors": tensors, "captured": captured(), "given back": given_back()}


def captured() -> int:
    """Tensors of a step in a graph, which no reading of counters may end."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), Stepped() as stepped:
        backward(model)
        optimizer.step()
    graph.replay()
    return stepped.tensors


def given_back() -> int:
    """Of what states have, once they are gone."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    backward(model)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    for state in optimizer.state.values():
        del state["exp_avg"]
    return before - torch.cuda.memory_allocated()


NUM_PARAMETERS = 4 * LAYERS


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
@pytest.mark.parametrize("segments", [GROWING, {}], ids=["growing", "default"])
def test_a_unit_is_one_tensor_where_segments_grow(segments):
    run = call_dry(found, machine=Machine(world=2), environment=segments)
    tensors = LAYERS if segments else NUM_PARAMETERS
    assert run["tensors"] == {"fused": tensors, "foreach": tensors}
    assert run["captured"] == tensors
    elements = 2 * LAYERS * (WIDTH + 1) * WIDTH // 2
    assert run["given back"] >= 4 * elements
