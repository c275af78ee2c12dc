"""A weight that several units share stays one weight; FSDP2 unties it silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from lowtide._torch_version import VERSION
from support.bits import same_bits
from support.systems import get_system
from support.training import local

NUM_STEPS = 3


class Tied(nn.Module):
    """Embedding and head share a weight, and so do the first and third block."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        if blocks:
            self.blocks[2].weight = self.blocks[0].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input=ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def train(model: Any) -> list[torch.Tensor | None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    values: list[torch.Tensor | None] = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, 13, (2, 5), generator=generator)
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for p in model.parameters():
            assert p.grad is not None
            values.append(local(p.grad).clone())
        optimizer.step()
        optimizer.zero_grad()
        values += [local(p).clone() for p in model.parameters()]
    return values


def shared_in_the_root(system_name: str, blocks: bool) -> Any:
    """What both systems do right: nothing that is tied is a unit of its own."""
    system = get_system(system_name)
    torch.manual_seed(3)
    model = Tied(blocks)
    system.fully_shard(model.blocks[1])
    system.fully_shard(model)
    system.prepare(model)
    return train(model)


def shared_over_units(blocks: bool, tie: str) -> tuple[Any, list[bool]]:
    """Every module its own unit, tied before sharding or afterwards, as it is or where
    it is loaded first: transformers puts another parameter there."""
    system = get_system("lowtide")
    torch.manual_seed(3)
    model: Any = Tied(blocks)
    if tie != "before":
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    for unit in (model.embed, *model.blocks, model.head, model):
        system.fully_shard(unit)
    if tie == "loaded":
        shard = model.embed.weight
        loaded = shard.detach().clone()
        with torch.no_grad():
            shard.zero_()
        model.embed.weight = nn.Parameter(loaded)
    if tie != "before":
        model.head.weight = model.embed.weight
    values = train(model)
    facts = [
        model.head.weight is model.embed.weight,
        (model.blocks[2].weight is model.blocks[0].weight) == blocks,
        len(list(model.parameters())) == (6 if blocks else 7),
        same_bits(local(model.state_dict()["head.weight"]), local(model.embed.weight)),
    ]
    return values, facts


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("tie", ["before", "afterwards", "loaded"])
@pytest.mark.parametrize("blocks", [False, True], ids=("head", "head_and_blocks"))
def test_weight_tied_over_units_is_shared(pool_of, num_ranks, blocks, tie):
    pool = pool_of(num_ranks)
    expected = pool.run(shared_in_the_root, "fsdp2", blocks)
    actual = pool.run(shared_over_units, blocks, tie)
    for rank in range(num_ranks):
        values, facts = actual[rank]
        assert facts == [True] * 4
        assert len(values) == len(expected[rank])
        for mine, theirs in zip(values, expected[rank], strict=True):
            assert same_bits(mine, theirs)


def assigned(system_name: str, units: str, differ: bool = False) -> Any:
    """A state dict without ties is loaded by assignment: into a model on meta, as rank
    0 sends its own, and again after a step."""
    system = get_system(system_name)
    with torch.device("meta"):
        model: Any = Tied(blocks=False)
    if units == "group":
        system.fully_shard([model.embed, model.head])
    elif units == "apart":
        system.fully_shard(model.embed)
        system.fully_shard(model.head)
    system.fully_shard(model)
    system.prepare(model)
    values: list[torch.Tensor | None] = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        whole = Tied(blocks=False).state_dict()
        if differ:
            whole["head.weight"] = whole["head.weight"] + 1
        state = {
            name: nn.Parameter(
                distribute_tensor(whole[name], p.device_mesh, [Shard(0)])
            )
            for name, p in model.state_dict().items()
        }
        model.load_state_dict(state, assign=True)
        values += train(model)
    return values, model.head.weight is model.embed.weight


@pytest.mark.parametrize("units", ["root", "group", "apart"])
def test_a_state_dict_without_ties_leaves_one_weight(pool_of, units):
    pool = pool_of(2)
    # torch refuses units that share a weight.
    expected = pool.run(assigned, "fsdp2", "root" if units == "apart" else units)
    for mine, theirs in zip(
        pool.run(assigned, "lowtide", units), expected, strict=True
    ):
        assert mine[1] and theirs[1]
        for value, other in zip(mine[0], theirs[0], strict=True):
            assert same_bits(value, other)


def untied() -> str:
    with pytest.raises(ValueError, match="lowtide") as error:
        assigned("lowtide", "root", differ=True)
    return str(error.value)


def test_a_state_dict_of_two_weights_for_one_is_named(pool_of):
    for message in pool_of(2).run(untied):
        assert message == (
            "lowtide: embed.weight: expected the parameter that fully_shard left "
            "there, got another DTensor of shape (13, 6) since. Replace, tie or remove "
            "a parameter before fully_shard; to change its values, load a state dict "
            "or write to the DTensor in place."
        )


def fsdp2_unties() -> list[bool]:
    system = get_system("fsdp2")
    torch.manual_seed(3)
    model: Any = Tied(blocks=False)
    for unit in (model.embed, model.head, model):
        system.fully_shard(unit)
    before = model.head.weight is model.embed.weight
    train(model)
    return [
        before,
        same_bits(local(model.head.weight), local(model.embed.weight)),
    ]


@pytest.mark.skipif(VERSION >= (2, 12), reason="torch's FSDP2 refuses it")
def test_fsdp2_unties_it_silently(pool_of):
    """Two weights from one, each with part of the gradient."""
    assert pool_of(2).run(fsdp2_unties) == [[False, False]] * 2


def tied_outside_the_root() -> str:
    system = get_system("lowtide")
    first: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
    second: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
    second[0].weight = first[0].weight
    for unit in (first[0], second[0], first, second):
        system.fully_shard(unit)
    try:
        first(torch.zeros(1, 4))
    except ValueError as error:
        return str(error)
    return "no error"


def tied_too_late() -> str:
    system = get_system("lowtide")
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (*model, model):
        system.fully_shard(unit)
    model(torch.zeros(1, 4)).sum().backward()
    model[1].weight = model[0].weight
    try:
        model.load_state_dict(model.state_dict())
    except ValueError as error:
        return str(error)
    return "no error"


def test_what_can_not_be_shared_is_refused(pool_of):
    for message in pool_of(2).run(tied_outside_the_root):
        assert message == (
            "lowtide: Linear.weight: expected a parameter that is tied within "
            "FSDPSequential, got one that FSDPLinear outside of it shares. Run forward "
            "through a module that contains both."
        )
    for message in pool_of(2).run(tied_too_late):
        assert message == (
            "lowtide: 1.weight: expected weights to be tied before the first forward, "
            "got one that has been tied to 0.weight since. Tie it when the model is "
            "built."
        )
