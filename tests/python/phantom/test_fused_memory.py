"""What ``grads="fused"`` allocates, dry, beside the exact mode: no weight gradient in
the compute dtype anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowtide
from lowtide.phantom.dry.launch import Machine
from support import workspaces
from support.dry_process import call_dry

DIM, HIDDEN, TOKENS, WORLD = 2048, 8192, 16, 8
WEIGHT = DIM * HIDDEN  # elements
# Of one weight, with a flag a parameter for every rank.
SLAB = 4 * (WEIGHT + 128 * WORLD)
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


def backwards() -> dict[str, dict[str, Any]]:
    dist.init_process_group("nccl")
    return {grads: backwards_of(grads) for grads in ("exact", "fused")}


def backwards_of(grads: str) -> dict[str, Any]:
    """Bytes that a backward allocates at most beyond what is there before it, a steady
    one with sync and the second of a step without, and the slabs of both."""
    mesh = init_device_mesh("cuda", (WORLD,))
    with torch.device("meta"):
        model: Any = nn.Sequential(*(Block() for _ in range(4)))
    for unit in (*model, model):
        lowtide.fully_shard(unit, mesh=mesh, mp_policy=POLICY, grads=grads)
    model.to_empty(device="cuda")
    x = torch.zeros(TOKENS, DIM, device="cuda", requires_grad=True)

    def peak(sync: bool) -> int:
        model.set_requires_gradient_sync(sync)
        loss = model(x).float().sum()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        return torch.cuda.max_memory_allocated() - before

    def slabs() -> tuple[int, int]:
        row = lowtide.memory_report(model, reset_peaks=True).categories
        return row["gradient_slab"].planned, row["gradient_slab"].peak

    peak(True)
    model.zero_grad()
    slabs()
    found: dict[str, Any] = {"sync": peak(True), "slabs of sync": slabs()}
    model.zero_grad()
    peak(False)
    found |= {"no_sync": peak(False), "slabs of no_sync": slabs()}
    peak(True)
    return found


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_no_weight_gradient_in_the_compute_dtype():
    found = call_dry(backwards, machine=Machine(world=WORLD))
    exact, fused = found["exact"], found["fused"]
    # The slabs are there: what is left are two units' parameters and their casts.
    parameters = 2 * (2 * WEIGHT * 2) * (1 + 1 / WORLD)
    product = 0 if workspaces.KEPT else workspaces.HOPPER
    assert fused["no_sync"] <= parameters + product + (1 << 20)
    # One parameter's gradient, of which the exact mode hides a unit's cast.
    assert exact["no_sync"] - fused["no_sync"] >= 2 * WEIGHT * 0.75
    # The ring is gone, and the slab of a weight is a unit's gradients in bf16.
    assert fused["sync"] < exact["sync"]
    assert fused["slabs of sync"] == (SLAB, SLAB)
    assert fused["slabs of no_sync"] == (8 * SLAB, 8 * SLAB)
