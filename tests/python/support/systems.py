"""The sharding systems that tests and benchmarks compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from support.left_fold import use_left_fold


@dataclass(frozen=True)
class System:
    name: str
    fully_shard: Callable[..., Any]
    MixedPrecisionPolicy: type[Any]
    FSDPModule: type[Any]

    def prepare(self, model: nn.Module) -> None:
        """After wrapping: FSDP2 adds in gloo's padded order, as lowtide does."""
        if self.name == "fsdp2" and dist.get_world_size() >= 3:
            use_left_fold(model)


def get_system(name: str) -> System:
    module = {"fsdp2": "torch.distributed.fsdp", "lowtide": "lowtide"}[name]
    source = importlib.import_module(module)
    return System(
        name, source.fully_shard, source.MixedPrecisionPolicy, source.FSDPModule
    )
