"""Gradients reduced in fp16: divided before and after the sum as FSDP2 does, so that
neither overflows nor vanishes, with its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from support.recorder import Recorder, assert_pattern_equals_fsdp2, finish_step
from support.systems import System
from support.training import local

Pattern = Callable[[System, Recorder], None]


def build(system: System, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)),
        nn.Linear(16, 8),
    )
    policy = system.MixedPrecisionPolicy(torch.float16, torch.float16)
    settings.setdefault("mp_policy", policy)
    for block in model[:2]:
        system.fully_shard(block, **settings)
    system.fully_shard(model, **settings)
    system.prepare(model)
    return model


def loss_of(model: nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(4, 16, generator=generator)
    loss: torch.Tensor = model(x).float().square().mean() * scale
    return loss


def train(model: Any, record: Recorder, scale: float = 1.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        loss_of(model, step, scale).backward()
        finish_step(model, optimizer, record)


def in_the_dtype_of_compute(system: System, record: Recorder) -> None:
    for scale in (1.0, 1e-6):  # of subnormal gradients
        train(build(system), record, scale)
    model = build(system)
    loss_of(model, 0, 3e4).backward()  # some overflow
    record.add_model(model)


def of_fp32_compute(system: System, record: Recorder) -> None:
    policy = system.MixedPrecisionPolicy(reduce_dtype=torch.float16)
    train(build(system, mp_policy=policy), record)


def microbatches_without_sync(system: System, record: Recorder) -> None:
    for reduce in (None, torch.float16):
        policy = system.MixedPrecisionPolicy(torch.float16, reduce)
        model = build(system, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for step in range(3):
            for microbatch in range(3):
                model.set_requires_gradient_sync(microbatch == 2)
                loss_of(model, 3 * step + microbatch, 1e-4).backward()
            finish_step(model, optimizer, record)


def over_replicas(system: System, record: Recorder) -> None:
    world = dist.get_world_size()
    for shape in ((world, 1), (1, world)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        train(build(system, mesh=mesh), record, 1e-5)


def divided_by_a_factor(system: System, record: Recorder) -> None:
    for factor in (2.0, 6.0, 5.0):
        model = build(system)
        for unit in (*model[:2], model):
            unit.set_gradient_divide_factor(factor)
        train(model, record, 1e-5)


def half_parameters(system: System, record: Recorder) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)).half()
    system.fully_shard(model)
    system.prepare(model)
    x = torch.randn(4, 16).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        model(x).float().square().mean().backward()
        finish_step(model, optimizer, record)


def scaled(system: System, record: Recorder) -> None:
    """With torch's scaler, whose first scale overflows."""
    model = build(system)
    scaler = GradScaler("cpu", init_scale=2.0**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(6):
        scaler.scale(loss_of(model, step)).backward()
        record.add_model(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record.add(f"scale {scaler.get_scale()}", None)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 12), nn.Linear(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def infinite_on_one_rank(system: System, record: Recorder) -> None:
    """Of `.grad`, as it came of the reduction: no rank may step. On four ranks, two of
    tensor parallelism."""
    if dist.get_world_size() == 2:
        model = build(system)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(Parallel(), Parallel())
        for block in model:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
            system.fully_shard(block, mesh=mesh["dp"])
        system.fully_shard(model, mesh=mesh["dp"])
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    for step, place in enumerate((None, 1, None, 0)):
        scaler.scale(loss_of(model, step)).backward()
        before = [local(p).clone() for p in model.parameters()]
        first = next(model.parameters())
        if dist.get_rank() == place:
            local(first.grad)[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        record.add_model(model)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record.add(f"scale {scaler.get_scale()}", None)
        record.add_model(model)
        stands = place is not None
        assert scaler.get_scale() == (scale / 2 if stands else scale)
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(local(parameter), old) == stands


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        in_the_dtype_of_compute,
        of_fp32_compute,
        microbatches_without_sync,
        over_replicas,
        divided_by_a_factor,
        half_parameters,
        scaled,
        infinite_on_one_rank,
    )
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_half_gradients_equal_fsdp2(pool_of, pattern):
    assert_pattern_equals_fsdp2(pool_of(2), __name__, pattern)


def test_one_ranks_infinity_is_all_ranks_of_tensor_parallelism_too(pool_of):
    pattern = infinite_on_one_rank.__name__
    assert_pattern_equals_fsdp2(pool_of(4), __name__, pattern)


def test_half_gradients_of_three_ranks_equal_fsdp2(pool_of):
    pattern = in_the_dtype_of_compute.__name__
    assert_pattern_equals_fsdp2(pool_of(3), __name__, pattern)
