"""A training run that is saved and resumed: what tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lowtide
from support.model import ModelConfig, batch, build, loss_fn
from support.systems import get_system
from support.training import local, units

SMALL = ModelConfig(dim=16, num_heads=2, kv_dim=2, ffn=10, logit_scale=True)
DROPPING = ModelConfig(dim=16, num_heads=2, kv_dim=2, ffn=10, dropout=0.1)


def mesh_of(kind: str) -> DeviceMesh:
    size = dist.get_world_size()
    if kind == "replicas":
        return init_device_mesh("cpu", (2, size // 2))
    return init_device_mesh("cpu", (size,))


def make(
    seed: int = 0,
    *,
    config: ModelConfig = SMALL,
    system: str = "lowtide",
    mesh: str = "shards",
    wrapping: str = "own_units",
    **settings: Any,
) -> tuple[Any, torch.optim.AdamW]:
    model = build(config, seed)
    which = get_system(system)
    for unit in units(model, wrapping):
        which.fully_shard(unit, mesh=mesh_of(mesh), **settings)
    which.prepare(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: Any, step: int, config: ModelConfig = SMALL) -> float:
    inputs, targets = batch(config, step, 0, dist.get_rank())
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss.item()


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
    config: ModelConfig = SMALL,
) -> list[float]:
    losses = []
    for step in steps:
        losses.append(backward(model, step, config))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of everything, and its random numbers' state."""
    state: dict[str, Any] = {"generator": torch.get_rng_state()}
    for name, p in model.named_parameters():
        state[name] = local(p).clone()
        state[f"{name}.grad"] = None if p.grad is None else local(p.grad).clone()
        for key, value in optimizer.state.get(p, {}).items():
            state[f"{name}.{key}"] = local(value).clone()
    for name, buffer in model.named_buffers():
        state[name] = buffer.clone()
    return dict(sorted(state.items()))


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All ranks' parts."""
    state = {}
    for name, p in model.named_parameters():
        state[name] = p.full_tensor()
        for key, value in optimizer.state.get(p, {}).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}.{key}"] = whole.clone()
    return {name: value.detach() for name, value in sorted(state.items())}


def save_after(path: Path, steps: int, seed: int = 0, **settings: Any) -> Any:
    """Trains and saves; returns the whole state."""
    model, optimizer = make(seed, **settings)
    train(model, optimizer, range(steps))
    lowtide.save(path, model, optimizer, {"step": steps})
    return full(model, optimizer)
