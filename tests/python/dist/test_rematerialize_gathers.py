"""Models that ``parallelize_module`` parallelised: their gathers are done again in
backward, or refused by the module's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._base.memory import ledger
from lowtide._gather.axes import axis_of
from support.sequence_parallel import bytes_held_after

CPU = torch.device("cpu")
BATCH, SEQ, DIM, HIDDEN = 2, 8, 16, 24


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writes = False
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.silu(self.w1(x)), self.w3(x)
        hidden = gate * up
        if self.writes:
            with torch.no_grad():
                up.add_(1)
        return self.w2(hidden)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.ffn = FeedForward()
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self.ffn, self.norm(x), use_reentrant=False)
        return x + self.ffn(self.norm(x))


def build(dim: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Two blocks, sequence-parallel along ``dim`` between the feed-forwards."""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(Block(), Block()).to(dtype)
    for block in model:
        plan = {
            "norm": SequenceParallel(sequence_dim=dim),
            "ffn": PrepareModuleInput(
                input_layouts=(Shard(dim),), desired_input_layouts=(Replicate(),)
            ),
            "ffn.w1": ColwiseParallel(),
            "ffn.w3": ColwiseParallel(),
            "ffn.w2": RowwiseParallel(
                output_layouts=Shard(dim), use_local_output=False
            ),
        }
        parallelize_module(block, mesh, plan)
    return model, mesh


def train(model: nn.Module, mesh: Any, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (BATCH, SEQ, DIM)
    whole = torch.randn(shape, generator=generator).to(dtype)
    local = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    x = DTensor.from_local(local, mesh, (Shard(dim),)).requires_grad_()
    loss = (model(x * 1).float() ** 2).mean()
    loss.backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [loss.full_tensor().detach(), *(g.to_local().clone() for g in gradients)]


def against_dtensor(dim: int, dtype: torch.dtype, names: Any) -> dict[str, Any]:
    model, mesh = build(dim, dtype)
    expected = train(model, mesh, dim, dtype)
    lowtide.sequence_parallel.rematerialize_gathers(model, names, min_bytes=0)
    axis = axis_of(mesh.get_group(), CPU)
    axis.reset_figures()
    got = train(model, mesh, dim, dtype)
    return {
        "equal": [torch.equal(a, b) for a, b in zip(got, expected, strict=True)],
        "regathers": {n: f["regathers"] for n, f in axis.figures().items()},
        "prefetched": {n: f["prefetched"] for n, f in axis.figures().items()},
        "held": ledger(CPU).live()["activations"],
    }


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [["*.ffn"], None], ids=["named", "all"])
def test_the_same_bits_and_one_gather_a_module(pool_of, dim, dtype, names):
    for seen in pool_of(2).run(against_dtensor, dim, dtype, names):
        assert all(seen["equal"]), seen
        assert seen["regathers"] == {"0.ffn": 1, "1.ffn": 1}
        assert seen["prefetched"] == {"0.ffn": 1, "1.ffn": 0}
        assert seen["held"] == 0


def held_between(again: bool) -> int:
    model, mesh = build(1)
    if again:
        lowtide.sequence_parallel.rematerialize_gathers(model, ["*.ffn"], min_bytes=0)
    local = torch.randn(BATCH, 64, DIM)
    x = DTensor.from_local(local, mesh, (Shard(1),)).requires_grad_()
    return bytes_held_after(lambda: model(x).sum())


def test_the_gathered_inputs_are_not_held(pool_of):
    saved = pool_of(2).run(held_between, False)
    again = pool_of(2).run(held_between, True)
    for before, after in zip(saved, again, strict=True):
        shard = BATCH * 64 * DIM * 4
        # Two inputs of twice the shard less; the two shards, outputs of a norm, more.
        assert before - after >= 2 * (2 * shard - shard)


def under_a_checkpoint() -> dict[str, Any]:
    model, mesh = build(1)
    expected = train(model, mesh, 1, torch.float32)
    for block in model:
        block.checkpointed = True
    lowtide.sequence_parallel.rematerialize_gathers(model, ["*.ffn"], min_bytes=0)
    axis = axis_of(mesh.get_group(), CPU)
    axis.reset_figures()
    got = train(model, mesh, 1, torch.float32)
    return {
        "equal": [torch.equal(a, b) for a, b in zip(got, expected, strict=True)],
        "figures": axis.figures(),
    }


def test_a_checkpoint_keeps_what_it_computes_again(pool_of):
    for seen in pool_of(2).run(under_a_checkpoint):
        assert all(seen["equal"])
        assert seen["figures"] == {}


def refusals() -> list[str]:
    model, mesh = build(1)
    texts = []

    def said(call: Any) -> None:
        try:
            call()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))

    said(lambda: lowtide.sequence_parallel.rematerialize_gathers(model, ["*.fnn"]))
    said(lambda: lowtide.sequence_parallel.rematerialize_gathers(nn.Linear(2, 2)))
    plain = nn.Sequential(nn.Linear(2, 2))
    said(lambda: lowtide.sequence_parallel.rematerialize_gathers(plain, ["0"]))
    wrong, _ = build(1)
    lowtide.sequence_parallel.rematerialize_gathers(wrong, ["0.ffn.w2"], min_bytes=0)
    said(lambda: train(wrong, mesh, 1, torch.float32))
    uneven, _ = build(1)
    lowtide.sequence_parallel.rematerialize_gathers(uneven, ["0.ffn"], min_bytes=0)
    whole = torch.randn(BATCH, 7, DIM)
    x = dist.tensor.distribute_tensor(whole, mesh, (Shard(1),))
    said(lambda: uneven(x))
    return texts


def test_what_can_not_be_done_is_refused_by_name(pool_of):
    for rank, texts in enumerate(pool_of(2).run(refusals)):
        who = "lowtide: rematerialize_gathers: expected "
        assert texts == [
            f"{who}'*.fnn' to match a module, got none. Did you mean '1.ffn'?",
            f"{who}a model that parallelize_module has parallelised, got Linear "
            "without any parallel style. Call parallelize_module first.",
            f"{who}'0' to have a parallel style that gathers its input, got none. Name "
            "the module that ColwiseParallel or PrepareModuleInput was applied to.",
            f"{who}an input of '0.ffn.w2' to be gathered, got none. Remove its name, "
            "or name the module whose parallel style gathers.",
            f"{who}the input of '0.ffn' as equal shards over a 1-D mesh, got "
            f"{(BATCH, 4 - rank, DIM)} of {(BATCH, 7, DIM)} over a mesh (2,). Pad the "
            "sequence, or leave the module out.",
        ]


def writes_to_a_saved_tensor() -> str:
    model, mesh = build(1)
    lowtide.sequence_parallel.rematerialize_gathers(model, ["*.ffn"], min_bytes=0)
    model[1].ffn.writes = True
    try:
        train(model, mesh, 1, torch.float32)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_write_to_a_saved_tensor_raises(pool_of):
    for text in pool_of(2).run(writes_to_a_saved_tensor):
        assert text == (
            "lowtide: rematerialize_gathers: expected a tensor that backward needs at "
            "version 0, as it was saved, got version 1: something wrote to it in "
            "place. Write out of place."
        )
