"""A function of the program's own returns gradients in fp32 for weights in bf16, as a
product with ``out_dtype`` does: what reaches hooks, the sum of microbatches and
``.grad`` has FSDP2's dtypes and bits; where no dtype is laid down it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lowtide._torch_version import VERSION
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import System, get_system

FP32, BF16 = torch.float32, torch.bfloat16
WIDTH = 8
ODD = 1 + 2**-7  # a number of bf16, its square is none


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().t() @ x.float()


class Wide(nn.Module):
    def __init__(self, storage: torch.dtype, grad_dtype: Any, *, unused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.125, dtype=storage))
        if unused:
            self.unused = nn.Parameter(torch.zeros_like(self.weight))
        if grad_dtype != "own":
            for parameter in self.parameters():
                parameter.grad_dtype = grad_dtype
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.register_hook(lambda grad: self.seen.append(grad.clone()))
        return Product.apply(x, self.weight)


def record_dtypes(record: Recorder, model: Any) -> None:
    for name, p in model.named_parameters():
        dtype = None if p.grad is None else p.grad.dtype
        record.add(f"{name}.grad {dtype}", p.grad)


def train(system: System, record: Recorder, schedule: str, **made: Any) -> None:
    replicas = schedule == "replicas"
    shape = (2, 1) if replicas else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    mesh = mesh if replicas else mesh["shards"]
    block = Wide(made["storage"], made["grad_dtype"], unused=schedule == "unused")
    model: Any = nn.Sequential(block)
    policy = system.MixedPrecisionPolicy(BF16, made["reduce"])
    system.fully_shard(block, mesh=mesh, mp_policy=policy)
    system.fully_shard(model, mesh=mesh)
    if schedule == "unused":
        model.set_reduce_scatter_unused_params(True)
    for step in range(2):
        model.zero_grad(set_to_none=step == 0)
        for micro in range(2):
            model.set_requires_gradient_sync(schedule != "late" or micro == 1)
            model.set_requires_all_reduce(not replicas or micro == 1)
            x = torch.full((2 + micro, WIDTH), ODD, dtype=BF16, requires_grad=True)
            if schedule == "checkpointed":
                y = checkpoint(model, x, use_reentrant=False)
            else:
                y = model(x)
            y.backward(torch.full_like(y, ODD * (dist.get_rank() + 1)))
            for grad in block.seen:
                record.add(f"seen {grad.dtype}", grad)
            block.seen.clear()
            record_dtypes(record, model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad.to(p.dtype), alpha=-0.001)


def trainings(system_name: str, **made: Any) -> Record:
    record = Recorder()
    for schedule in ("each", "late", "checkpointed", "replicas", "unused"):
        if schedule == "unused" and made["grad_dtype"] is None:
            continue
        train(get_system(system_name), record, schedule, **made)
    return record.values


def of_a_policy(name: str, storage: Any, grad_dtype: Any, reduce: Any) -> Record:
    return trainings(name, storage=storage, grad_dtype=grad_dtype, reduce=reduce)


@pytest.mark.skipif(VERSION < (2, 15), reason="FSDP2 follows grad_dtype from 2.15 on")
@pytest.mark.parametrize("reduce", [None, BF16, FP32])
@pytest.mark.parametrize("grad_dtype", ["own", FP32, BF16])
@pytest.mark.parametrize("storage", [BF16, FP32])
def test_has_the_bits_of_fsdp2(pool_of, storage, grad_dtype, reduce):
    assert_trains_as_fsdp2(pool_of(2), of_a_policy, storage, grad_dtype, reduce)


@pytest.mark.skipif(VERSION < (2, 15), reason="FSDP2 follows grad_dtype from 2.15 on")
@pytest.mark.parametrize("reduce", [BF16, FP32])
def test_any_dtype_is_rounded_to_that_of_the_reduction(pool_of, reduce):
    assert_trains_as_fsdp2(pool_of(2), of_a_policy, BF16, None, reduce)


def of_any_dtype(schedule: str) -> str:
    with pytest.raises(NotImplementedError) as error:
        train(
            get_system("lowtide"),
            Recorder(),
            schedule,
            storage=FP32,
            grad_dtype=None,
            reduce=None,
        )
    return str(error.value)


@pytest.mark.parametrize("schedule", ["each", "late", "replicas"])
def test_one_that_no_buffer_was_laid_out_for_is_refused(pool_of, schedule):
    for message in pool_of(2).run(of_any_dtype, schedule):
        assert message == (
            "lowtide: 0.weight: expected gradients in the dtype it is computed with, "
            "torch.bfloat16, as its grad_dtype is None and the policy has no "
            "reduce_dtype, got torch.float32. Set its grad_dtype to torch.float32 "
            "before the first forward."
        )
