"""Matrices split along their columns, with everything around them: the bits of those
that are split along rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import lowtide
from lowtide.stepping import StepUndone
from support.bombs import Boom

# Too large for the packed row of a gather.
DIM, HIDDEN, STEPS, MICROBATCHES = 16, 2304, 4, 2
BF16 = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make(dim: int, in_backward: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(DIM, DIM))
    for module in (*model, model):
        lowtide.fully_shard(
            module,
            mp_policy=BF16,
            shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None,
        )
    for block in model[:2]:
        lowtide.checkpoint(block, lowtide.ActivationPolicy(offload=["input"]))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if in_backward:
        lowtide.optimize_in_backward(model, optimizer)
    return model, optimizer


def one_step(
    model: Any, optimizer: torch.optim.Optimizer, number: int, breaks: bool = False
) -> list[torch.Tensor]:
    losses = []
    for microbatch in range(MICROBATCHES):
        model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
        torch.manual_seed(100 * number + 10 * microbatch + dist.get_rank())
        loss = model(torch.randn(6, DIM)).square().sum()
        losses.append(loss.detach())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if breaks:
        raise Boom
    return losses


def train(dim: int, in_backward: bool, folder: Path) -> list[torch.Tensor]:
    """Every step breaks once on the last rank, the model sleeps between two, and
    half-way another one goes on, whose matrices are split along the other dimension."""
    last = dist.get_rank() == dist.get_world_size() - 1
    model, optimizer = make(dim, in_backward)
    seen = []
    for number in range(STEPS):
        if number == STEPS // 2:
            lowtide.save(folder / f"{dim}", model, optimizer, {})
            model, optimizer = make(1 - dim, in_backward)
            lowtide.load(folder / f"{dim}", model, optimizer)
        with pytest.raises(Boom if last else StepUndone):
            with lowtide.step(model, optimizer):
                one_step(model, optimizer, number, breaks=last)
        lowtide.sleep(model, optimizer)
        lowtide.wake(model, optimizer)
        with lowtide.step(model, optimizer):
            seen += one_step(model, optimizer, number)
    for p in model.parameters():
        assert isinstance(p, DTensor)
        seen.append(p.detach().full_tensor())
    return seen


@pytest.mark.parametrize("in_backward", [False, True], ids=["behind", "in backward"])
def test_columns_have_the_bits_of_rows(pool_of, tmp_path, in_backward):
    pool = pool_of(2)
    rows, columns = (pool.run(train, d, in_backward, tmp_path) for d in (0, 1))
    for mine, other in zip(columns, rows, strict=True):
        assert len(mine) == STEPS * MICROBATCHES + 14
        assert all(map(torch.equal, mine, other))
