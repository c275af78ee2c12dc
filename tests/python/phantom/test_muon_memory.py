"""What a step of ``lowtide.Muon`` has on the device beyond what is there, dry: a few of
the largest matrices, however many blocks there are."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry

DIM, WIDE, WORLD = 4096, 14336, 8  # Llama 8B's
LARGEST = 2 * DIM * WIDE  # bytes of the largest matrix in bf16, as it travels
BLOCK = 4 * (2 * DIM * DIM + 2 * DIM * DIM // 4 + 3 * DIM * WIDE)  # in fp32
WORKSPACE = 32 << 20  # of cuBLAS's products, for an H100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, rows, columns in (
            *(("q", DIM, DIM), ("k", DIM // 4, DIM), ("v", DIM // 4, DIM)),
            *(("o", DIM, DIM), ("gate", WIDE, DIM), ("up", WIDE, DIM)),
            ("down", DIM, WIDE),
        ):
            self.add_module(name, nn.Linear(columns, rows, bias=False))


def steps() -> dict[str, int]:
    dist.init_process_group("nccl")
    return {
        "8 blocks": step_of(8),
        "16 blocks": step_of(16),
        "32 blocks": step_of(32),
        "replicas": step_of(8, (2, WORLD // 2)),
    }


def step_of(blocks: int, shape: tuple[int, ...] = (WORLD,)) -> int:
    """The most bytes in a step that has its states, beyond those before it."""
    gc.collect()
    mesh = init_device_mesh("cuda", shape)
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(blocks)))
    for unit in (*model, model):
        lowtide.fully_shard(unit, mesh=mesh)
    model.to_empty(device="cuda")
    optimizer = lowtide.Muon(model.parameters(), lr=0.02)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.memory_allocated() == before
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_a_step_has_a_batch_at_a_time():
    """Of the batch before and of the one behind, what a rank sends and gets: its part
    of the rows, and a matrix. Of this one the matrix in work, its copy, its next
    iterate, two products of its shorter side, and a result, where several share a
    rank."""
    found = call_dry(steps, machine=Machine(world=WORLD))
    products = 2 * 2 * DIM * DIM
    bound = 2 * 2 * LARGEST + 4 * LARGEST + products + WORKSPACE
    for name, most in found.items():
        assert most <= bound, (name, most / LARGEST)
        assert most <= 1.1 * BLOCK, name
    assert found["32 blocks"] <= found["16 blocks"] + LARGEST // 8, found
