"""A Lightning trainer runs a module that shards itself: with FSDP2, with lowtide's
functions in its place, and with lowtide's strategy around FSDP2's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lowtide.integrations import lightning
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

NUM_BATCHES = 4
SAVED_AT = 2


def as_torchrun() -> None:
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


def module_of(shard: Any, record: Recorder, seed: int) -> Any:
    """``shard(module, mesh)`` or None, which shards with the ``fully_shard`` that this
    file has imported from torch."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
            )

        def configure_model(self) -> None:
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for block in self.layers:
                (shard or fully_shard)(block, mesh=mesh)
            (shard or fully_shard)(self.layers, mesh=mesh)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = (self.layers(batch) - batch).pow(2).mean()
            record.add("loss", loss)
            return loss

        def on_after_backward(self) -> None:
            record.add_model(self.layers)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            record.add_model(self.layers)  # clipped

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05, foreach=False)

    return Module()


def trainer_of(how: str, directory: str, steps: int) -> Any:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import ModelParallelStrategy

    size = dist.get_world_size()
    strategy = (
        lightning.strategy_class(ModelParallelStrategy)
        if how == "strategy"
        else ModelParallelStrategy
    )
    return pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy(data_parallel_size=size, tensor_parallel_size=1),
        max_steps=steps,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )


def fit(how: str, directory: str) -> tuple[Record, bool]:
    """Four batches with a checkpoint after two, from which another module resumes."""
    import lowtide

    as_torchrun()
    shard = None if how == "strategy" else get_system(how).fully_shard
    record = Recorder()
    data = torch.randn(
        NUM_BATCHES * dist.get_world_size() * 2,
        6,
        generator=torch.Generator().manual_seed(3),
    )
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    saved = str(Path(directory, how))
    module = module_of(shard, record, seed=0)
    trainer = trainer_of(how, directory, SAVED_AT)
    trainer.fit(module, loader)
    trainer.save_checkpoint(saved)
    resumed = module_of(shard, record, seed=1)
    trainer_of(how, directory, NUM_BATCHES).fit(resumed, loader, ckpt_path=saved)
    record.add_model(resumed.layers)
    blocks = [*module.layers, *resumed.layers]
    return record.values, all(isinstance(b, lowtide.FSDPModule) for b in blocks)


@pytest.mark.parametrize("how", ["lowtide", "strategy"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_trainer_gives_the_bits_of_fsdp2(pool_of, tmp_path, num_ranks, how):
    pool = pool_of(num_ranks)
    theirs = pool.run(fit, "fsdp2", str(tmp_path))
    ours = pool.run(fit, how, str(tmp_path))
    for (mine, own), (other, foreign) in zip(ours, theirs, strict=True):
        assert own and not foreign
        assert sum(name == "loss" for name, _ in mine) == NUM_BATCHES
        assert_same_records(mine, other)


def fit_unsharded(directory: str) -> None:
    as_torchrun()
    module = module_of(lambda module, mesh: module, Recorder(), seed=0)
    trainer_of("strategy", directory, 1).fit(module, [torch.ones(2, 6)])


def test_strategy_refuses_a_model_that_is_not_sharded(pool_of, tmp_path):
    (outcome,) = pool_of(1).outcomes(fit_unsharded, str(tmp_path))
    assert outcome.error.startswith(
        "lowtide: integrations.lightning: expected configure_model of Module to call "
        "fully_shard, got a model that lowtide has not sharded. "
    )


def test_either_package_of_lightnings(monkeypatch):
    class Theirs:
        pass

    # What another test may have asked for is kept.
    monkeypatch.delitem(vars(lightning), "LowtideStrategy", raising=False)
    for name in lightning._PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    package = ModuleType("lightning.pytorch")
    strategies = ModuleType("lightning.pytorch.strategies")
    strategies.ModelParallelStrategy = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.strategies", strategies)
    assert issubclass(lightning.LowtideStrategy, Theirs)
    monkeypatch.delattr(lightning, "LowtideStrategy")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    with pytest.raises(
        ImportError, match=r"pytorch_lightning, got lightning.pyt.* and"
    ):
        _ = lightning.LowtideStrategy
