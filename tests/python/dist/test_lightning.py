"""A Lightning trainer runs a module that shards itself, with either system."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

NUM_BATCHES = 4


def fit(system_name: str, directory: str) -> Record:
    """As under torchrun: two processes, `ModelParallelStrategy`, no checkpoint."""
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import ModelParallelStrategy

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="none",
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
    )
    system = get_system(system_name)
    record = Recorder()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
            )

        def configure_model(self) -> None:
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            if not isinstance(self.layers, system.FSDPModule):
                for block in self.layers:
                    system.fully_shard(block, mesh=mesh)
                system.fully_shard(self.layers, mesh=mesh)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = (self.layers(batch) - batch).pow(2).mean()
            record.add("loss", loss)
            return loss

        def on_after_backward(self) -> None:
            record.add_model(self.layers)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05, foreach=False)

    data = torch.randn(
        NUM_BATCHES * size * 2, 6, generator=torch.Generator().manual_seed(3)
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1),
        max_epochs=1,
        accumulate_grad_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    record.add_model(module.layers)
    return record.values


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_trainer_gives_the_bits_of_fsdp2(pool_of, tmp_path, num_ranks):
    pool = pool_of(num_ranks)
    theirs = pool.run(fit, "fsdp2", str(tmp_path))
    ours = pool.run(fit, "lowtide", str(tmp_path))
    for mine, other in zip(ours, theirs, strict=True):
        assert sum(name == "loss" for name, _ in mine) == NUM_BATCHES
        assert_same_records(mine, other)
