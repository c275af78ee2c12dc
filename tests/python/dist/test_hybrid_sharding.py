"""HSDP: sharded over one mesh dimension, replicated over the other, as FSDP2 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from support.model import TINY, batch, build, loss_fn
from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
    finish_step,
)
from support.systems import System, get_system
from support.training import adamw

NUM_STEPS = 3
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2)]


def hybrid(system: System, shape: tuple[int, int], **settings: Any) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: Any = build(TINY)
    for module in (*model.layers, model):
        system.fully_shard(module, mesh=mesh, mp_policy=policy, **settings)
    return model


# Called with the model, the microbatch and their number.
Schedule = Callable[[Any, int, int], None]


def every_backward(model: Any, microbatch: int, count: int) -> None:
    pass


def reduce_once(model: Any, microbatch: int, count: int) -> None:
    model.set_requires_gradient_sync(microbatch == count - 1)


def all_reduce_once(model: Any, microbatch: int, count: int) -> None:
    model.set_requires_all_reduce(microbatch == count - 1)


def both(model: Any, microbatch: int, count: int) -> None:
    """Local, local and reduced over shards, local, all."""
    model.set_requires_gradient_sync(microbatch in (1, count - 1))
    model.set_requires_all_reduce(microbatch == count - 1)


SCHEDULES: dict[str, tuple[Schedule, int]] = {
    "every_backward": (every_backward, 2),
    "reduce_once": (reduce_once, 3),
    "all_reduce_once": (all_reduce_once, 3),
    "both": (both, 4),
}


def train(
    system_name: str, shape: tuple[int, int], schedule: str, clip: bool
) -> Record:
    model = hybrid(get_system(system_name), shape)
    optimizer = adamw(model, foreach=False)
    before, count = SCHEDULES[schedule]
    record = Recorder()
    for step in range(NUM_STEPS):
        for microbatch in range(count):
            before(model, microbatch, count)
            inputs, targets = batch(TINY, step, microbatch, dist.get_rank())
            loss = loss_fn(model(inputs), targets)
            record.add("loss", loss)
            loss.backward()
            record.add_model(model)
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            record.add("norm", norm.full_tensor())  # type: ignore[attr-defined]
        finish_step(model, optimizer, record)
    return record.values


@pytest.mark.parametrize("shape", MESHES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_equals_fsdp2(pool_of, shape, schedule):
    pool = pool_of(shape[0] * shape[1])
    assert_trains_as_fsdp2(pool, train, shape, schedule, schedule == "reduce_once")


def train_with(system_name: str, change: str) -> Record:
    system = get_system(system_name)
    model = hybrid(system, (2, 2))
    for unit in (*model.layers, model):
        CHANGES[change](unit)
    optimizer = adamw(model, foreach=False)
    record = Recorder()
    for step in range(NUM_STEPS):
        inputs, targets = batch(TINY, step, 0, dist.get_rank())
        loss_fn(model(inputs), targets).backward()
        finish_step(model, optimizer, record)
    return record.values


def force_sum(unit: Any) -> None:
    unit.set_force_sum_reduction_for_comms(True)


def divide(unit: Any) -> None:
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(8.0)


def divide_by_the_shards(unit: Any) -> None:
    """The one factor FSDP2 takes without a forced sum on gloo."""
    unit.set_gradient_divide_factor(2)


def hook(unit: Any) -> None:
    unit.set_all_reduce_hook(lambda row: row.mul_(0.75))


CHANGES = {f.__name__: f for f in (force_sum, divide, divide_by_the_shards, hook)}


@pytest.mark.parametrize("change", CHANGES)
def test_reduction_settings_equal_fsdp2(pool_of, change):
    pool = pool_of(4)
    assert_trains_as_fsdp2(pool, train_with, change)


def own_all_reduce(system_name: str, native: bool) -> Record:
    """A hook that sums over another group does what the second dimension does."""
    system = get_system(system_name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = build(TINY)
    chosen = mesh if native else mesh["shard"]
    for module in (*model.layers, model):
        system.fully_shard(module, mesh=chosen)
        if not native:
            module.set_all_reduce_hook(
                lambda row: dist.all_reduce(
                    row, op=dist.ReduceOp.AVG, group=mesh.get_group("replicate")
                )
            )
    record = Recorder()
    for step in range(NUM_STEPS):
        inputs, targets = batch(TINY, step, 0, dist.get_rank())
        loss_fn(model(inputs), targets).backward()
        record.add_model(model)
    return record.values


def test_hook_over_replicas_equals_two_dimensions(pool_of):
    pool = pool_of(4)
    native = pool.run(own_all_reduce, "lowtide", True)
    for other in ("lowtide", "fsdp2"):
        for mine, theirs in zip(
            native, pool.run(own_all_reduce, other, False), strict=True
        ):
            assert_same_records(mine, theirs)


class Branches(nn.Module):
    """Uses one of two layers: which one may differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](self.stem(x))


def unused_by_some(later: bool) -> list[list[tuple[bool, float]]]:
    """Rank 0 uses branch 0, the others branch 1, nobody branch 2; by step, as ranks
    know from the second one on that some leave parameters out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model: Any = get_system("lowtide").fully_shard(Branches(), mesh=mesh)
    which = 0 if dist.get_rank() == 0 else 1
    facts = []
    for _ in range(3):
        for microbatch in range(1 + later):
            model.set_requires_all_reduce(microbatch == int(later))
            chosen = which if microbatch == 0 else 1
            model(torch.ones(1, 3), chosen).sum().backward()
        bias = [branch.bias.grad for branch in model.branches]
        facts.append(
            [
                (g is not None, float(g.full_tensor()[0]) if g is not None else 0.0)
                for g in bias
            ]
        )
        model.zero_grad()
    return facts


@pytest.mark.parametrize("later", [False, True], ids=("at_once", "kept_first"))
def test_use_on_one_replica_counts_on_all(pool_of, later):
    for facts in pool_of(4).run(unused_by_some, later):
        expected = 0.75 + (1.0 if later else 0.0)
        assert facts == 3 * [[(True, 0.25), (True, expected), (False, 0.0)]]


def describe() -> dict[str, Any]:
    from lowtide._sharding.unit import unit_state

    model = hybrid(get_system("lowtide"), (2, 2))
    weight = model.layers[0].w1.weight
    inputs, targets = batch(TINY, 0, 0, dist.get_rank())
    state = unit_state(model)
    assert state is not None and state.groups.replicas is not None
    state.groups.replicas.reset_counters()
    loss_fn(model(inputs), targets).backward()
    calls, wire = state.groups.replicas.counters["all-reduce"]
    local_bytes = sum(4 * p.to_local().numel() for p in model.parameters())
    return {
        "placements": weight.placements,
        "dims": weight.device_mesh.mesh_dim_names,
        "of gradients": weight.grad.placements,
        "all-reduces a unit": calls / len([*model.layers, model]),
        "bytes, no more than padded": local_bytes <= wire <= 1.8 * local_bytes,
    }


def test_parameters_are_replicated_and_sharded(pool_of):
    placements = (Replicate(), Shard(0))
    for facts in pool_of(4).run(describe):
        assert facts == {
            "placements": placements,
            "dims": ("replicate", "shard"),
            "of gradients": placements,
            "all-reduces a unit": 1,  # of one reduce dtype
            "bytes, no more than padded": True,
        }
