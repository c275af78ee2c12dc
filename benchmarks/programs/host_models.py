"""The models of the host cost cases: tiny, on a process group of one process.

Tensors of a few elements leave the system's own work (hooks, autograd nodes,
bookkeeping) and that of torch's ``fake`` group, whose gathers copy their input once a
rank.
"""

from __future__ import annotations

import torch
from stage import init_fake_group
from torch import nn

from support.model import ModelConfig, batch, build, loss_fn
from support.systems import get_system

WORLD_SIZE = 8
SYSTEMS = ("plain", "fsdp2", "lowtide")


def start() -> None:
    torch.set_num_threads(1)
    init_fake_group(WORLD_SIZE)


def config(num_layers: int) -> ModelConfig:
    return ModelConfig(
        dim=16,
        num_layers=num_layers,
        vocab=64,
        num_heads=2,
        num_kv_heads=2,
        kv_dim=16,
        ffn=32,
        seq=8,
        batch=1,
    )


class Training:
    """Forward and backward of one system, separately."""

    def __init__(self, system_name: str, num_layers: int, device: str = "cpu") -> None:
        shape = config(num_layers)
        self.num_units = num_layers + 1  # the blocks and the root
        self._inputs, self._targets = (t.to(device) for t in batch(shape, 0, 0, 0))
        self.model: nn.Module = build(shape).to(device)
        self._loss: torch.Tensor | None = None
        if system_name == "plain":
            self.model = self.model.bfloat16()
            return
        system = get_system(system_name)
        policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for module in (*self.model.layers, self.model):
            system.fully_shard(module, mp_policy=policy)

    def forward(self) -> None:
        self._loss = loss_fn(self.model(self._inputs), self._targets)

    def backward(self) -> None:
        assert self._loss is not None
        self._loss.backward()

    def finish(self) -> None:
        """What stays outside both: dropping the gradients."""
        self._loss = None
        self.model.zero_grad()
