"""Gradients of microbatches that wait for a reduction, over the shards or over the
replicas, of all units or of some: FSDP2's sums, with its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lowtide._torch_version import VERSION
from support.recorder import Recorder, assert_pattern_equals_fsdp2
from support.systems import System, get_system

Pattern = Callable[[System, Recorder], None]
BF16, FP32 = torch.bfloat16, torch.float32
MICROBATCHES = 3


def net() -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 6), *layers)


def rows(step: int, microbatch: int) -> torch.Tensor:
    seed = 100 * step + 10 * microbatch + dist.get_rank()
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))


def mesh_of(*, replicas: bool) -> Any:
    shape = (2, 1) if replicas else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return mesh if replicas else mesh["shards"]


def train(
    system: System,
    record: Recorder,
    units: str,
    *,
    replicas: bool = False,
    sums_wait: bool = False,  # those over the shards do not, over the replicas they do
    reshard: bool | int = True,
    keeps: bool = False,  # full parameters, until the last backward is over
) -> None:
    model = net()
    for unit in (*model[1:], model):
        system.fully_shard(
            unit, mesh=mesh_of(replicas=replicas), reshard_after_forward=reshard
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    chosen = {"all": [model], "some": model[1:3], "root": [model]}[units]
    recurse = units != "root"
    for step in range(3):
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            for unit in chosen:
                if sums_wait:
                    unit.set_requires_all_reduce(last, recurse=recurse)
                else:
                    unit.set_requires_gradient_sync(last, recurse=recurse)
                if keeps:
                    unit.set_reshard_after_backward(last, recurse=recurse)
            model.set_is_last_backward(last)
            model(rows(step, microbatch)).sum().backward()
            if last or not keeps:  # else full parameters are shown, see below
                record.add_model(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 1)


def of_all_units(system: System, record: Recorder) -> None:
    train(system, record, "all")
    train(system, record, "all", reshard=2)
    train(system, record, "all", reshard=False, keeps=True)
    train(system, record, "all", replicas=True)
    train(system, record, "all", replicas=True, sums_wait=True)


def of_some_units(system: System, record: Recorder) -> None:
    train(system, record, "some", reshard=False)
    train(system, record, "some", replicas=True)
    train(system, record, "some", replicas=True, sums_wait=True, reshard=False)


def of_the_root_alone(system: System, record: Recorder) -> None:
    train(system, record, "root")
    train(system, record, "root", reshard=False, keeps=True)
    train(system, record, "root", replicas=True, sums_wait=True)


def gathered_for_a_pipeline(system: System, record: Recorder) -> None:
    """All units before the first of several microbatches, until the last."""
    for keeps in (False, True):
        model = net()
        for unit in (*model[1:], model):
            system.fully_shard(unit, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            for module in model.modules():
                if isinstance(module, system.FSDPModule):
                    module.unshard(async_op=True)
            for microbatch in range(MICROBATCHES):
                last = microbatch == MICROBATCHES - 1
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                if keeps:
                    model.set_reshard_after_backward(last)
                model(rows(step, microbatch)).sum().backward()
            record.add_model(model)
            optimizer.step()
            optimizer.zero_grad()


class Two(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(inputs, outputs, bias=False)
        self.second = nn.Linear(inputs, outputs, bias=False)
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return y + self.second(x) if self.both else y


def backward(model: Any, value: float, inputs: int, dtype: torch.dtype = BF16) -> None:
    x = torch.full((1, inputs), value, dtype=dtype, requires_grad=True)
    model(x).sum().backward()


def reduced_beside_what_waits(system: System, record: Recorder) -> None:
    """What was reduced before is added in the dtype of ``.grad``, what waits in that
    of the reduction, in which 256 + 1 is 256."""
    for reduce in (BF16, FP32, None):
        for factor in (None, 3.0):
            torch.manual_seed(0)
            model: Any = nn.Linear(1, 2, bias=False)
            policy = system.MixedPrecisionPolicy(BF16, reduce)
            system.fully_shard(model, mp_policy=policy)
            if factor is not None:
                model.set_force_sum_reduction_for_comms(True)
                model.set_gradient_divide_factor(factor)
            for values in ((256, -1, -256), (3, -256, -1, 256)):
                for number, value in enumerate(values):
                    model.set_requires_gradient_sync(number in (0, len(values) - 1))
                    backward(model, float(value), 1)
                    record.add_model(model)
                model.zero_grad()


def one_waits_for_shards_another_for_replicas(system: System, record: Recorder) -> None:
    """Two weights of a unit; the last microbatch uses one of them."""
    for split, (inputs, outputs) in enumerate(((1, 5), (4, 4))):
        model: Any = Two(inputs, outputs)
        system.fully_shard(
            [model.first, model.second],
            mesh=mesh_of(replicas=True),
            shard_placement_fn=lambda _, split=split: Shard(split),
            reshard_after_forward=False,
            mp_policy=system.MixedPrecisionPolicy(BF16, BF16),
        )
        system.fully_shard(model)
        model.set_reshard_after_backward(False)
        backward(model, 4.0, inputs)
        model.set_requires_all_reduce(False)
        backward(model.first, 2.0, inputs)
        backward(model.second, 3.0, inputs)
        model.set_requires_gradient_sync(False)
        backward(model.first, 1.0, inputs)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        for both in (False, True):
            model.both = both
            backward(model, 1.0, inputs)
            model.first.reshard()
            record.add_model(model)


def cleared_behind_a_forward(system: System, record: Recorder) -> None:
    """While full parameters are shown: what waits, not what the backward brings."""
    for set_to_none in (False, True):
        for reshard in (False, True):
            torch.manual_seed(0)
            model: Any = nn.Linear(6, 6)
            policy = system.MixedPrecisionPolicy(BF16, FP32)
            system.fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
            model.set_requires_gradient_sync(False)
            for microbatch in range(2):
                model(rows(0, microbatch)).sum().backward()
            loss = model(rows(1, 0)).sum()
            model.unshard()
            model.zero_grad(set_to_none=set_to_none)
            loss.backward()
            model.set_requires_gradient_sync(True)
            model(rows(1, 1)).sum().backward()
            record.add_model(model)


def half_gradients_beside_larger_ones(system: System, record: Recorder) -> None:
    """Which are in ``.grad`` in fp32 already: their sum is none of fp16."""
    for clears in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Linear(1, 1, bias=False)
        policy = system.MixedPrecisionPolicy(torch.float16, torch.float16)
        system.fully_shard(model, mp_policy=policy)
        for number, value in enumerate((40000.0, 30000.0, 0.0)):
            if number == 1 and clears:
                model.zero_grad()
            model.set_requires_gradient_sync(number != 1)
            backward(model, value, 1, FP32)
            record.add_model(model)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        of_all_units,
        of_some_units,
        of_the_root_alone,
        gathered_for_a_pipeline,
        reduced_beside_what_waits,
        one_waits_for_shards_another_for_replicas,
        cleared_behind_a_forward,
        half_gradients_beside_larger_ones,
    )
}


# What FSDP2 does otherwise before 2.15.
BEFORE = {
    "one_waits_for_shards_another_for_replicas": "adds one weight's sum to another's",
    "cleared_behind_a_forward": "clears nothing",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_equals_fsdp2(pool_of, pattern):
    if pattern in BEFORE and VERSION < (2, 15):
        pytest.skip(f"FSDP2 {BEFORE[pattern]}")
    assert_pattern_equals_fsdp2(pool_of(2), __name__, pattern)


def shown_between(system_name: str) -> list[Any]:
    """``.grad`` of the full weight behind a microbatch without sync, which is written
    to, and what is reduced."""
    system = get_system(system_name)
    model: Any = nn.Linear(2, 2, bias=False)
    system.fully_shard(model, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    waits = model.weight.grad
    if waits is not None:
        waits.mul_(10)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model(torch.ones(1, 2)).sum().backward()
    return [waits is not None, model.weight.grad.full_tensor().unique().tolist()]


def test_what_waits_is_not_shown(pool_of):
    assert pool_of(2).run(shown_between, "lowtide") == [[False, [2.0]]] * 2


@pytest.mark.skipif(VERSION < (2, 15), reason="before, where no reduce_dtype is set")
def test_fsdp2_shows_what_waits(pool_of):
    assert pool_of(2).run(shown_between, "fsdp2") == [[True, [11.0]]] * 2
