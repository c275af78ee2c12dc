"""Ranks that wrapped different models hear so in the first forward, with both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from support.systems import get_system


class Module(nn.Module):
    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(p.sum() for p in self.parameters())


def weight(
    rows: int = 4, columns: int = 3, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, columns, dtype=dtype))


def other_name(odd: bool) -> nn.Module:
    return Module(**{"gate" if odd else "proj": weight()})


def other_shape(odd: bool) -> nn.Module:
    return Module(proj=weight(rows=5 if odd else 4))


def other_columns_of_one_size(odd: bool) -> nn.Module:
    return Module(proj=weight(4, 3) if odd else weight(2, 6))


def other_dtype(odd: bool) -> nn.Module:
    return Module(proj=weight(dtype=torch.bfloat16 if odd else torch.float32))


def other_order(odd: bool) -> nn.Module:
    first, second = ("gate", "proj") if odd else ("proj", "gate")
    return Module(**{first: weight(), second: weight()})


def one_more(odd: bool) -> nn.Module:
    parameters = {"proj": weight()} | ({"extra": weight()} if odd else {})
    return Module(**parameters)


def other_requires_grad(odd: bool) -> nn.Module:
    module = Module(proj=weight())
    module.proj.requires_grad_(not odd)
    return module


# What each message must show of rank 0's side and of the odd rank's.
CASES: dict[Callable[[bool], nn.Module], tuple[str, str]] = {
    other_name: ("parameter 'proj'", "parameter 'gate'"),
    other_shape: ("(4, 3)", "(5, 3)"),
    other_columns_of_one_size: ("(2, 6)", "(4, 3)"),
    other_dtype: ("torch.float32", "torch.bfloat16"),
    other_order: ("parameter 'proj'", "parameter 'gate'"),
    one_more: ("nothing more", "parameter 'extra'"),
    other_requires_grad: ("torch.float32, policy", "torch.float32 frozen, policy"),
}


def run_forward(module: nn.Module) -> str:
    """The error it raises, as "type: message"."""
    try:
        module(torch.zeros(1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrap_and_run(case: str) -> str:
    """The last rank's model is the odd one.  Afterwards the ranks must still be
    able to run a model on which they agree."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    build = {case.__name__: case for case in CASES}[case]
    system = get_system("lowtide")
    result = run_forward(system.fully_shard(build(odd)))
    assert run_forward(system.fully_shard(Module(proj=weight()))) == "no error"
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_rank_sees_both_sides(pool_of, world_size, case):
    messages = pool_of(world_size).run(wrap_and_run, case.__name__, timeout=30)
    if world_size == 1:
        # A rank agrees with itself.
        assert messages == ["no error"]
        return
    first, last = CASES[case]
    for rank, message in enumerate(messages):
        assert message.startswith(
            "RuntimeError: lowtide: fully_shard: expected the same"
        )
        shown = message.index(first), message.index(" on rank 0 and ")
        odd = message.rindex(last), message.index(f" on rank {world_size - 1} ")
        assert shown[0] < shown[1] < odd[0] < odd[1], message
        assert f"rank {rank} of {world_size}" in message
        assert message.endswith("the same way on every rank.")


def wrap_other_units(num_layers: int) -> str:
    """The last rank makes the last block a unit of its own, the others do not."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    system = get_system("lowtide")
    model = nn.Sequential(*(Module(proj=weight()) for _ in range(num_layers)))
    for layer in list(model)[: num_layers if odd else num_layers - 1]:
        system.fully_shard(layer)
    return run_forward(system.fully_shard(model))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_units_that_differ_are_named(pool_of, world_size):
    for message in pool_of(world_size).run(wrap_other_units, 3, timeout=30):
        assert "parameter '2.proj'" in message and "unit '0'" in message


def wrap_with_other_settings(settings: dict[str, Any], odd_settings: dict[str, Any]):
    odd = dist.get_rank() == dist.get_world_size() - 1
    system = get_system("lowtide")
    module = Module(proj=weight())
    return run_forward(
        system.fully_shard(module, **(odd_settings if odd else settings))
    )


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_REDUCE_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        ({"mp_policy": BF16}, {"mp_policy": BF16_REDUCE_FP32}),
        ({"reshard_after_forward": True}, {"reshard_after_forward": False}),
    ],
    ids=["mp_policy", "reshard_after_forward"],
)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_settings_that_change_what_is_sent_must_agree(pool_of, world_size, settings):
    pool = pool_of(world_size)
    for message in pool.run(wrap_with_other_settings, *settings, timeout=30):
        assert message.startswith(
            "RuntimeError: lowtide: fully_shard: expected the same"
        )
        assert f"on rank {world_size - 1}" in message
