"""Ranks that wrap different models learn so at once, with both sides shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.systems import get_system


class Module(nn.Module):
    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


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
    return Module(proj=weight(dtype=torch.float16 if odd else torch.float32))


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


# What each message must show of the one side and of the other.
CASES: dict[Callable[[bool], nn.Module], tuple[str, str]] = {
    other_name: ("gate", "proj"),
    other_shape: ("[5, 3]", "[4, 3]"),
    other_columns_of_one_size: ("[4, 3]", "[2, 6]"),
    other_dtype: ("float16", "float32"),
    other_order: ("gate", "proj"),
    one_more: ("extra", "1 parameter"),
    other_requires_grad: ("frozen", "trainable"),
}


def wrap_disagreeing(case: str) -> tuple[str, str]:
    """The error of this rank; the last rank's model is the odd one.  Then a
    model on which all agree must train."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    build = {case.__name__: case for case in CASES}[case]
    system = get_system("lowtide")
    try:
        system.fully_shard(build(odd))
    except Exception as error:
        result = (type(error).__name__, str(error))
    else:
        result = ("", "no error")
    module = Module(proj=weight())
    system.fully_shard(module)
    module.unshard()
    assert module.proj.shape == (4, 3)
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_rank_sees_both_sides(pool_of, world_size, case):
    if world_size == 1:
        # A rank always agrees with itself.
        assert pool_of(1).run(wrap_disagreeing, case.__name__) == [("", "no error")]
        return
    results = pool_of(world_size).run(wrap_disagreeing, case.__name__, timeout=30)
    for rank, (kind, message) in enumerate(results):
        assert kind == "ValueError", message
        assert message.startswith("lowtide: ")
        assert f"(rank {rank} of {world_size})" in message
        for side in CASES[case]:
            assert side in message
        assert f"rank {world_size - 1}" in message


def one_rank_wraps_more_units(num_layers: int) -> str:
    """The last rank wraps one block more than the others."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    system = get_system("lowtide")
    model = nn.Sequential(*(Module(proj=weight()) for _ in range(num_layers)))
    try:
        for layer in list(model)[: num_layers if odd else num_layers - 1]:
            system.fully_shard(layer)
        system.fully_shard(model)
    except Exception as error:
        return str(error)
    return "no error"


def test_units_that_differ_are_named(pool_of, world_size):
    if world_size == 1:
        return
    for message in pool_of(world_size).run(one_rank_wraps_more_units, 2, timeout=30):
        assert message.startswith("lowtide: ") and "proj" in message
