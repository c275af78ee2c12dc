"""Conversions (`to`, `bfloat16`, `to_empty`, ...) of modules that are no units, with
parameters of units inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
)
from support.systems import get_system


class Model(nn.Module):
    """Blocks and the embedding are units; norm and head are the root's."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Around(nn.Module):
    """As peft's model is around the program's."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model = Model(tied)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens) * self.scale.sum()


def make(fully_shard: Any, tied: bool = False) -> Any:
    torch.manual_seed(0)
    around = Around(tied)
    if fully_shard is not None:
        for module in (*around.model.blocks, around.model.embedding, around):
            fully_shard(module)
    return around


def step(around: Any, optimizer: Any, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(seed))
    logits = around(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def kept(system_name: str, gathered: bool) -> Record:
    """Conversions that leave everything as it is, between the steps."""
    around = make(get_system(system_name).fully_shard)
    optimizer = torch.optim.SGD(around.parameters(), lr=0.1, momentum=0.9)
    model, record = around.model, Recorder()
    parts = (model, model.norm, model.head, model.blocks[0][2], model.embedding)
    for seed, part in enumerate(parts):
        record.add("loss", step(around, optimizer, seed))
        if gathered:
            around.unshard()
        assert part.to("cpu") is part
        assert model.float() is model
        record.add("loss", step(around, optimizer, seed + 10))
    record.add_model(around)
    return record.values


@pytest.mark.parametrize("gathered", [False, True], ids=["sharded", "gathered"])
def test_conversions_inside_a_unit_keep_the_bits(pool_of, gathered):
    ours, theirs = (
        pool_of(2).run(kept, system, gathered) for system in ("lowtide", "fsdp2")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_records(mine, other)


class Converting(nn.Module):
    """As the routers of Switch Transformers are: sure of a dtype in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(torch.bfloat16)
        return torch.tanh(self.classifier(x))


def converted_in_forward(system_name: str) -> Record:
    system = get_system(system_name)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(Converting(), nn.Linear(8, 8)) for _ in range(2))
    )
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model:
        system.fully_shard(block, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = Recorder()
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        loss = model(x).float().pow(2).mean()
        loss.backward()
        record.add("loss", loss)
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()
    record.add_model(model)
    return record.values


def test_a_conversion_to_what_it_is_leaves_a_forward_alone(pool_of):
    assert_trains_as_fsdp2(pool_of(2), converted_in_forward)


def zeroed_while_gathered() -> list[bool]:
    """Conversions that change a tensor in its place are conversions."""
    around = make(get_system("lowtide").fully_shard)
    step(around, torch.optim.SGD(around.parameters(), lr=0.1), 0)
    around.unshard()
    gathered = not isinstance(around.model.norm.weight, DTensor)
    around.model.norm._apply(lambda tensor: tensor.mul_(0))
    around.reshard()
    return [gathered, not around.model.norm.weight.to_local().any()]


def test_a_conversion_in_place_reaches_the_shards(pool_of):
    assert pool_of(2).run(zeroed_while_gathered) == [[True, True]] * 2


def rounded(part: str, tied: bool) -> list[torch.Tensor]:
    """What forward computes with, and trains, is what conversions left."""
    losses = []
    for fully_shard in (None, get_system("lowtide").fully_shard):
        around = make(fully_shard, tied)
        optimizer = torch.optim.SGD(around.parameters(), lr=0.1)
        for seed in range(3):
            around.get_submodule(part).bfloat16().float()
            losses.append(step(around, optimizer, seed))
    return losses


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("part", ["model", "model.norm", "model.head", "model.blocks"])
def test_values_of_a_conversion_inside_a_unit_are_the_units(pool_of, part, tied):
    (losses,) = pool_of(1).run(rounded, part, tied)
    assert torch.equal(torch.stack(losses[3:]), torch.stack(losses[:3]))


def copied(system_name: str) -> Record:
    """A copy of a part of a unit is converted, and trained with, alone."""
    around = make(get_system(system_name).fully_shard)
    optimizer = torch.optim.SGD(around.parameters(), lr=0.1)
    step(around, optimizer, 0)
    norm = copy.deepcopy(around.model.norm)
    norm.to(torch.bfloat16)
    norm.load_state_dict(norm.state_dict())
    record = Recorder()
    record.add("loss", step(around, optimizer, 1))
    record.add_model(norm)
    record.add_model(around)
    return record.values


def test_a_copy_of_a_part_of_a_unit_is_alone(pool_of):
    assert_trains_as_fsdp2(pool_of(2), copied)
