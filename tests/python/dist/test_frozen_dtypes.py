"""Frozen parameters of dtypes that no gradient may have: FSDP2's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide._torch_version import VERSION
from support.bits import assert_same_tensors
from support.systems import get_system
from support.training import local

DTYPES = [torch.float16, torch.float8_e4m3fn, torch.int64]


class Adapted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        base = torch.randn(8, 8).to(dtype)
        self.base = nn.Parameter(base, requires_grad=False)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.base.to(x.dtype) + self.adapter(x)


def sharded(system_name: str, dtype: torch.dtype, compute: torch.dtype | None) -> Any:
    torch.manual_seed(0)
    system = get_system(system_name)
    policy = system.MixedPrecisionPolicy(param_dtype=compute)
    model: Any = nn.Sequential(Adapted(dtype), Adapted(dtype))
    for block in model:
        system.fully_shard(block, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    system.prepare(model)
    return model


def step(*args: Any) -> dict[str, Tensor]:
    model = sharded(*args)
    loss = (model(torch.arange(16.0).view(2, 8)) ** 2).sum()
    loss.backward()
    assert all(block.base.grad is None for block in model)
    result = {"loss": loss.detach().view(1)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            result[name] = local(parameter.grad).clone()
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_it_is_gathered_and_never_reduced(pool_of, dtype, compute):
    if dtype == torch.int64 and VERSION < (2, 12):
        pytest.skip("FSDP2 refuses integers")
    pool = pool_of(2)
    expected = pool.run(step, "fsdp2", dtype, compute)
    for rank, actual in enumerate(pool.run(step, "lowtide", dtype, compute)):
        assert_same_tensors(actual, expected[rank], f"rank {rank}")


def all_frozen_at_first(system_name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a gradient is reduced in is not known by the first forward."""
    model = sharded(system_name, dtype, torch.bfloat16)
    adapters = [block.adapter for block in model]
    for adapter in adapters:
        adapter.requires_grad_(False)
    x = torch.arange(16.0).view(2, 8)
    with torch.no_grad():
        result = {"frozen": model(x).view(-1)}
    for adapter in adapters:
        adapter.requires_grad_(True)
    model(x).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.dtype == torch.float32
            result[name] = local(parameter.grad).clone()
    assert len(result) == 5
    return result


@pytest.mark.parametrize(
    ("dtype", "since"), [(torch.float16, (2, 15)), (torch.int64, (2, 14))]
)
def test_what_is_trained_may_all_be_frozen_at_first(pool_of, dtype, since):
    if VERSION < since:
        pytest.skip("FSDP2 of 2.14 raises beside fp16; an older one was not tried")
    pool = pool_of(2)
    expected = pool.run(all_frozen_at_first, "fsdp2", dtype)
    ours = pool.run(all_frozen_at_first, "lowtide", dtype)
    for rank, actual in enumerate(ours):
        assert_same_tensors(actual, expected[rank], f"rank {rank}")


def unfrozen(dtype: torch.dtype) -> tuple[str, bool]:
    """The error, and whether a step works after freezing it again."""
    model = sharded("lowtide", dtype, None)
    x = torch.ones(2, 8)
    model(x).sum().backward()
    model[1].base.requires_grad_()
    try:
        model(x)
    except ValueError as error:
        message = str(error)
    else:
        return "no error", False
    model[1].base.requires_grad_(False)
    model.zero_grad()
    model(x).sum().backward()
    return message, model[1].adapter.weight.grad is not None


def test_one_that_begins_to_require_grad_is_refused(pool_of):
    for message, goes_on in pool_of(2).run(unfrozen, torch.float8_e4m3fn):
        assert message.startswith(
            "lowtide: unit '1': expected 1.base, which has begun to "
            "require grad, to be reduced in torch.float32, torch.bfloat16, "
            "torch.float16 or torch.float64, got "
        ), message
        assert goes_on
