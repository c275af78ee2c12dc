"""torchtitan's trainer from 0.3 on, which is built of one `Trainer.Config`; imported
after titan_on_cpus has prepared the process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import fsdp
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
)

from lowtide._torch_version import STORES_ANNOTATED
from support import titan_on_cpus

CHECKPOINTING = {"none": None, "full": FullAC.Config, "selective": SelectiveAC.Config}


class Batches(titan_on_cpus.Batches, BaseDataLoader):
    """With positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 2048

    def __init__(self, config: Config, *, dp_rank: int, **settings: Any) -> None:
        size = (settings["local_batch_size"], settings["seq_len"] + 1)
        super().__init__(dp_rank, size, config.vocabulary)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        rows, length = self.size
        positions = torch.arange(length - 1).expand(rows, -1).contiguous()
        for inputs, targets in super().__iter__():
            yield inputs | {"positions": positions}, targets


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Config, **settings: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **settings: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **settings: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Metrics(MetricsProcessor):
    """What the trainer gives its metrics processor, kept."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config): ...

    def __init__(self, config: Config, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.logged: list[tuple[float, float]] = []  # loss, norm of the gradients

    log = titan_on_cpus.Metrics.log


def without_flex(model: Any) -> None:
    """FlexAttention is trained with on accelerators alone; its trainer takes the
    attention that Flux has, too."""
    for _, found, holder, name in list(model.traverse(FlexAttention.Config)):
        assert isinstance(found, FlexAttention.Config)
        setattr(holder, name, ScaledDotProductAttention.Config())


def on_cpus(config: Any) -> Any:
    config.model_spec.state_dict_adapter = None
    config.validator.enable = False
    config.debug.enable_structured_logging = False
    return config


def trainer_of(
    parallelize: Callable[[Callable[..., Any]], Callable[..., Any]],
    folder: Path,
    steps: int,
    guard: Callable[[Any], None] | None = None,
    **settings: Any,
) -> Any:
    # Page-locked memory is the accelerators'.
    fsdp.CPUOffloadPolicy = functools.partial(CPUOffloadPolicy, pin_memory=False)
    family = settings.pop("model", "llama3")
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    config = on_cpus(getattr(registry, f"{family}_debugmodel")())
    spec = config.model_spec
    if not settings.pop("flex", False):
        without_flex(spec.model)
    spec.model.layers = spec.model.layers[:3]
    spec.parallelize_fn = parallelize(spec.parallelize_fn)
    if guard is not None:
        spec.post_optimizer_build_fn = lambda optimizers, *_: guard(optimizers)
    config.dataloader = Batches.Config()
    config.tokenizer = NoTokenizer.Config()
    config.metrics = Metrics.Config(log_freq=1)
    config.dump_folder = str(folder)
    config.training.seq_len = settings.pop("seq_len", titan_on_cpus.SEQ_LEN)
    config.training.local_batch_size = titan_on_cpus.BATCH
    config.training.steps, config.training.max_norm = steps, 0.5
    config.training.disable_cuda_graphs = not settings.pop("graphs", False)
    config.training.enable_cpu_offload = settings.pop("offloaded", False)
    config.debug.seed = 0
    config.lr_scheduler.warmup_steps = 0
    config.optimizer.implementation = "for-loop"
    for group in config.optimizer.param_groups:
        group.optimizer_kwargs["lr"] = 1e-2
    config.checkpoint.enable = settings.pop("saves", True)
    config.checkpoint.interval = 2
    config.checkpoint.last_save_model_only = False
    config.compile.enable = settings.pop("compiled", False)
    config.compile.backend = "aot_eager"
    checkpointing = CHECKPOINTING[settings.pop("checkpointing", "none")]
    config.activation_checkpoint = checkpointing() if checkpointing else None
    if settings.pop("whole_logits", False):
        config.loss = config.loss.loss_fn
        config.training.mixed_precision_param = "float32"
    if not STORES_ANNOTATED:  # FSDP2 refuses the parameters of torchtitan's default
        config.parallelism.spmd_backend = "partial_dtensor"
    for name, value in settings.items():
        setattr(config.parallelism, name, value)
    return config.build()
