"""torch's pipeline schedules drive lowtide's stages as they drive FSDP2's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)

from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

NUM_STEPS = 3
MICROBATCHES = 4
DIM = 6


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)
        )
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def stages_of(system_name: str, mesh: Any, interleaved: bool) -> list[Any]:
    """This rank's stages: two pipeline ranks, each with data-parallel ranks."""
    system = get_system(system_name)
    torch.manual_seed(1)
    count = 4 if interleaved else 2
    stages = [Stage() for _ in range(count)]
    rank = mesh.get_local_rank("pp")
    made = []
    for index in range(rank, count, 2):
        module: Any = stages[index]
        for layer in module.layers:
            system.fully_shard(layer, mesh=mesh["dp"])
        system.fully_shard(module, mesh=mesh["dp"])
        made.append(
            PipelineStage(
                module,
                index,
                count,
                torch.device("cpu"),
                group=mesh.get_group("pp"),
            )
        )
    return made


def train(system_name: str, interleaved: bool) -> Record:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp")
    )
    stages = stages_of(system_name, mesh, interleaved)

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).pow(2).mean()

    schedule: Any = (
        ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_fn)
        if interleaved
        else Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_fn)
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, foreach=False)
    record = Recorder()
    first, last = mesh.get_local_rank("pp") == 0, mesh.get_local_rank("pp") == 1
    for step in range(NUM_STEPS):
        seed = 10 * step + mesh.get_local_rank("dp")
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2 * MICROBATCHES, DIM, generator=generator)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([x] if first else []),
            **({"target": x.flip(0), "losses": losses} if last else {}),
        )
        for i, loss in enumerate(losses):
            record.add(f"loss {i}", loss)
        for stage in stages:
            record.add_model(stage.submod)
        optimizer.step()
        optimizer.zero_grad()
    return record.values


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("interleaved", [False, True], ids=("1f1b", "interleaved"))
def test_schedule_trains_bit_equal_to_fsdp2(pool_of, num_ranks, interleaved):
    pool = pool_of(num_ranks)
    theirs = pool.run(train, "fsdp2", interleaved)
    ours = pool.run(train, "lowtide", interleaved)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_records(mine, other)
        gradients = [v for name, v in mine if name.endswith(".grad")]
        assert gradients and all(gradient is not None for gradient in gradients)
