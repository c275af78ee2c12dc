"""Loops of four frameworks that nobody edits, each over a small model: a training is
``loop(folder, sharded, steps)``. ``sharded`` makes the framework shard, by its name in
lowtide's integrations or not at all, where a session binds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lowtide.integrations import all_or_nothing
from support import accelerate_on_cpus, titan_on_cpus

ALL = ("accelerate", "lightning", "torchtitan", "transformers")
DIM = 6


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.1)


def _accelerator(in_program: bool) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from lowtide.integrations.accelerate import use_lowtide

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    made = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    return use_lowtide(made, all_or_nothing=True) if in_program else made


def accelerate(folder: Path, in_program: bool, steps: int, accumulate: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(), Block(), nn.Linear(DIM, DIM))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    # Made before the optimizer is prepared: it wraps the step, too.
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    size = dist.get_world_size()
    loader: Any = torch.utils.data.DataLoader(rows(2 * steps * 2 * size), batch_size=2)
    accelerator = _accelerator(in_program)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    torch.manual_seed(1 + dist.get_rank())
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - x).pow(2).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def transformers(folder: Path, in_program: bool, steps: int, accumulate: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from lowtide.integrations.accelerate import use_lowtide

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        **sizes,
    )
    tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(3))
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            str(folder),
            use_cpu=True,
            max_steps=steps,
            save_strategy="no",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulate,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch",
            fsdp="full_shard auto_wrap",
            fsdp_config={
                "version": 2,
                "reshard_after_forward": True,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "cpu_ram_efficient_loading": False,
            },
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    if in_program:
        use_lowtide(trainer.accelerator, all_or_nothing=True)
    trainer.train()


def lightning(folder: Path, in_program: bool, steps: int, accumulate: int) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import ModelParallelStrategy

    from lowtide.integrations.lightning import strategy_class

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(Block(), Block())

        def configure_model(self) -> None:
            for module in (*self.layers, self.layers):
                fully_shard(module)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return (self.layers(batch) - batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    size = dist.get_world_size()
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="none")
    settings: dict[str, Any] = {"data_parallel_size": size, "tensor_parallel_size": 1}
    if in_program:
        strategy = strategy_class(ModelParallelStrategy)(
            **settings, all_or_nothing=True
        )
    else:
        strategy = ModelParallelStrategy(**settings)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    data = rows(2 * steps * accumulate * size)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))


def torchtitan(folder: Path, in_program: bool, steps: int, accumulate: int) -> None:
    from lowtide.integrations.torchtitan import parallelize_fn

    titan_on_cpus.prepare()
    parallelize = parallelize_fn if in_program else lambda theirs: theirs
    if titan_on_cpus.HAS_CONFIGS:
        given = all_or_nothing.guard if in_program else None
        trainer = titan_on_cpus.trainer_of(parallelize, folder, steps, guard=given)
    else:
        with _guarding_specs() if in_program else contextlib.nullcontext():
            trainer = titan_on_cpus.trainer_of(parallelize, folder, steps)
    try:
        trainer.train()
    finally:
        trainer.close()


@contextlib.contextmanager
def _guarding_specs() -> Iterator[None]:
    """torchtitan 0.2's specs of models, as they are added."""
    from torchtitan.protocols import train_spec

    from lowtide.integrations.torchtitan import build_optimizers_fn

    class Guarding(dict[str, Any]):
        def __setitem__(self, name: str, spec: Any) -> None:
            build = build_optimizers_fn(spec.build_optimizers_fn)
            spec = dataclasses.replace(spec, build_optimizers_fn=build)
            super().__setitem__(name, spec)

    specs = train_spec._extra_train_specs
    train_spec._extra_train_specs = Guarding(specs)
    try:
        yield
    finally:
        train_spec._extra_train_specs = specs


def run(
    framework: str, folder: Path, in_program: bool, steps: int, accumulate: int = 1
) -> None:
    loop: Callable[..., None] = globals()[framework]
    rank, size = dist.get_rank(), dist.get_world_size()
    accelerate_on_cpus.as_torchrun(rank, size)
    if framework in ("accelerate", "transformers"):
        accelerate_on_cpus.accept_cpus()
    try:
        loop(folder, in_program, steps, accumulate)
    finally:
        if framework in ("accelerate", "transformers"):
            accelerate_on_cpus.forget()
