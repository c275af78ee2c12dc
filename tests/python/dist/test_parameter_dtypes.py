"""Parameters of one unit that are computed with in dtypes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide._torch_version import VERSION
from support.bits import assert_same_tensors
from support.systems import get_system
from support.training import local


class Routed(nn.Module):
    """A router in fp32 beside experts in bf16, as mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        self.experts = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert self.experts.weight.dtype == torch.bfloat16
        if not isinstance(self.router, lowtide.FSDPModule):
            assert self.router.weight.dtype == torch.float32
        gate = self.router(x.float()).softmax(-1).amax(-1, keepdim=True)
        return self.experts(x) * gate.to(x.dtype) + x


def policy_with(
    system: Any, override: Any, dtype: torch.dtype | None = torch.bfloat16
) -> Any:
    return system.MixedPrecisionPolicy(
        dtype, torch.float32, param_dtype_override_fn=override
    )


def routers_stay(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if len(parameter) == 3 else None


def train(system_name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    system = get_system(system_name)
    model = nn.Sequential(Routed(), Routed())
    if system_name == "lowtide" or VERSION >= (2, 15):
        policy = policy_with(system, routers_stay)
    else:
        policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model:  # what a careful user does there
            alone = system.MixedPrecisionPolicy(None, torch.float32)
            system.fully_shard(block.router, mp_policy=alone)
    for block in model:
        system.fully_shard(block, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    system.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    result = {}
    for step in range(3):
        x = torch.arange(16.0).view(2, 8) / 16 + torch.distributed.get_rank() + step
        loss = (model(x).float() ** 2).sum()
        loss.backward()
        for name, parameter in model.named_parameters():
            result[f"gradient {step} {name}"] = local(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
        result[f"loss {step}"] = loss.detach().view(1)
    return result


def test_an_override_has_the_bits_of_fsdp2(pool_of, world_size):
    pool = pool_of(world_size)
    expected = pool.run(train, "fsdp2")
    for rank, actual in enumerate(pool.run(train, "lowtide")):
        assert_same_tensors(actual, expected[rank], f"rank {rank}")


def shard_with(override: Any) -> str:
    with pytest.raises(ValueError, match="lowtide: ") as error:
        lowtide.fully_shard(Routed(), mp_policy=policy_with(lowtide, override))
    return str(error.value)


def half(parameter: nn.Parameter) -> torch.dtype:
    return torch.float16


def test_another_dtype_than_the_two_is_refused(pool_of):
    for text in pool_of(1).run(shard_with, half):
        assert text == (
            "lowtide: Linear.weight: expected param_dtype_override_fn to return None, "
            "the policy's param_dtype, torch.bfloat16, or the parameter's own, "
            "torch.float32, got torch.float16. Convert the parameter before "
            "fully_shard."
        )


def by_rank(parameter: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if torch.distributed.get_rank() else None


def forward_with(override: Any) -> str:
    model = Routed()
    lowtide.fully_shard(model, mp_policy=policy_with(lowtide, override))
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 8))
    return str(error.value)


def test_ranks_that_answer_differently_are_told(pool_of):
    for text in pool_of(2).run(forward_with, by_rank):
        assert "param_dtype=torch.float32" in text
        assert "param_dtype=torch.bfloat16" in text
