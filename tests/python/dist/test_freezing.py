"""``requires_grad`` that changes while gradients wait for a reduction, or between a
forward and its backward: the bits of FSDP2, exact and fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide._sharding import embedding
from support.bombs import Boom, Explosion
from support.fused import Model, data
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system


def model_of(how: str, kind: type[nn.Module] = Model, **settings: Any) -> Any:
    """``how``: "fsdp2", or the mode of lowtide's gradients."""
    torch.manual_seed(0)
    model: Any = kind()
    system = get_system("fsdp2" if how == "fsdp2" else "lowtide")
    if how != "fsdp2":
        settings["grads"] = how
    for block in model.blocks:
        system.fully_shard(block, **settings)
    system.fully_shard(model, **settings)
    system.prepare(model)
    return model


def single(model: Any) -> list[nn.Parameter]:
    """Weights that are one slice or lie apart, small parameters: one unit and two."""
    first, last = model.blocks
    return [first.up.weight, first.odd.weight, first.up.bias, last.norm.weight]


def weight(model: Any) -> list[nn.Parameter]:
    return [model.head.weight]


def unit(model: Any) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


CHOICES = {choice.__name__: choice for choice in (single, weight, unit)}
Choice = Callable[[Any], list[nn.Parameter]]


def set_trainable(parameters: list[nn.Parameter], value: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(value)


def loss_of(model: Any, seed: int) -> torch.Tensor:
    return model(data(seed)).pow(2).sum()


# Whether microbatches train the chosen parameters, by step.
FLAGS = ("11", "10", "01", "010", "101", "100", "001", "11")


def accumulated(model: Any, record: Recorder, choice: Choice) -> None:
    for step, flags in enumerate(FLAGS):
        for micro, flag in enumerate(flags):
            set_trainable(choice(model), flag == "1")
            model.set_requires_gradient_sync(micro == len(flags) - 1)
            loss_of(model, 10 * step + micro).backward()
        record.add_model(model)
        model.zero_grad()


def recorded(how: str, choice: str) -> Record:
    record = Recorder()
    accumulated(model_of(how), record, CHOICES[choice])
    return record.values


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("choice", CHOICES)
def test_frozen_or_not_between_microbatches(pool_of, choice, ranks):
    assert_same_as_fsdp2(pool_of(ranks), recorded, choice)


def assert_same_as_fsdp2(pool: Any, program: Callable[..., Record], *args: Any) -> None:
    theirs = pool.run(program, "fsdp2", *args)
    for grads in ("exact", "fused"):
        ours = pool.run(program, grads, *args)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_records(mine, other)


def kept_gathered(how: str) -> Record:
    """The modules show full parameters between microbatches."""
    model, record = model_of(how, reshard_after_forward=False), Recorder()
    model.set_reshard_after_backward(False)
    for module in model.blocks:
        set_trainable(list(module.parameters()), False)
    loss_of(model, 0).backward()
    model.reshard()  # FSDP2's zero_grad sees what is shown only
    model.zero_grad()
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            set_trainable(single(model), step + micro != 1)
            loss_of(model, 10 * step + micro).backward()
        for module in (*model.blocks, model):
            module.reshard()
        record.add_model(model)
        model.zero_grad()
        for module in model.blocks:
            module.unshard()
    return record.values


def shown(how: str, frozen: str, changed: str) -> Record:
    """Full parameters are `changed` while some are frozen from the beginning."""
    model, record = model_of(how, reshard_after_forward=False), Recorder()
    of_shards = {n: p for n, p in model.named_parameters()}
    set_trainable([of_shards[frozen]], False)
    model.set_reshard_after_backward(False)
    for step, sync in enumerate((True, True, False, True, True)):
        if step in (1, 3):
            other = {"freeze": of_shards, "unfreeze": [frozen]}[changed]
            for name in list(other)[:5]:
                model.get_parameter(name).requires_grad_(changed == "unfreeze")
        if step == 4:
            for module in (*model.blocks, model):
                module.reshard()
        model.set_requires_gradient_sync(sync)
        loss_of(model, step).backward()
        for name, shard in of_shards.items():
            record.add(name, shard)
            record.add(f"{name}.grad", shard.grad)
    return record.values


@pytest.mark.parametrize("changed", ["freeze", "unfreeze"])
@pytest.mark.parametrize("frozen", ["blocks.0.up.weight", "blocks.1.norm.bias"])
def test_what_is_shown_says_what_is_frozen(pool_of, frozen, changed):
    assert_same_as_fsdp2(pool_of(2), shown, frozen, changed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_full_parameters_are_frozen_or_not(pool_of, ranks):
    assert_same_as_fsdp2(pool_of(ranks), kept_gathered)


# -- at other times --------------------------------------------------------------------


def before_backward(model: Any, record: Recorder) -> None:
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, 10 * step + micro)
            # The root shows its full parameters until its backward is over.
            set_trainable(single(model) + weight(model), step + micro != 1)
            loss.backward()
            set_trainable(single(model) + weight(model), True)
        record.add_model(model)
        model.zero_grad()


def forwards_first(model: Any, record: Recorder) -> None:
    for step in range(3):
        first = loss_of(model, 10 * step)
        set_trainable(single(model), step != 1)
        second = loss_of(model, 10 * step + 1)
        for loss in (first, second):
            model.set_requires_gradient_sync(loss is second)
            loss.backward()
        set_trainable(single(model), True)
        record.add_model(model)
        model.zero_grad()


def retained(model: Any, record: Recorder) -> None:
    for step in range(2):
        loss = loss_of(model, step)
        model.set_requires_gradient_sync(False)
        loss.backward(retain_graph=True)
        set_trainable(single(model), False)
        model.set_requires_gradient_sync(True)
        loss.backward()
        set_trainable(single(model), True)
        record.add_model(model)
        model.zero_grad()


def both_reduce(model: Any, record: Recorder) -> None:
    """The second has no forward between it and the first."""
    for step in range(2):
        set_trainable(single(model), False)
        model.set_requires_gradient_sync(False)
        loss_of(model, 10 * step).backward()
        set_trainable(single(model), True)
        losses = [loss_of(model, 10 * step + micro) for micro in (1, 2)]
        model.set_requires_gradient_sync(True)
        for loss in losses:
            loss.backward()
            record.add_model(model)
        model.zero_grad()


def summed(model: Any, record: Recorder) -> None:
    """Forwards under different plans have one backward."""
    first = loss_of(model, 0)
    loss_of(model, 1).backward()  # ranks agree on another order
    (first + loss_of(model, 2)).backward()
    record.add_model(model)
    model.zero_grad()
    first = loss_of(model, 3)
    set_trainable(single(model)[2:], False)
    (first + loss_of(model, 4)).backward()
    record.add_model(model)


def frozen_in_the_other_forward(model: Any, record: Recorder) -> None:
    for step in range(2):
        first = loss_of(model, 10 * step)
        set_trainable(single(model), False)
        second = loss_of(model, 10 * step + 1)
        set_trainable(single(model), True)
        for loss in (first, second):
            loss.backward()
        record.add_model(model)
        model.zero_grad()


def not_frozen_any_more_in_forward(model: Any, record: Recorder) -> None:
    def unfreeze_and_run(block: Any, x: torch.Tensor) -> torch.Tensor:
        set_trainable(list(block.parameters()), True)
        return block(x)

    for step in range(3):
        set_trainable(unit(model), False)
        if step == 1:
            model.run_block = unfreeze_and_run
        loss_of(model, step).backward()
        record.add_model(model)
        model.zero_grad()


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (
        before_backward,
        forwards_first,
        retained,
        both_reduce,
        summed,
        frozen_in_the_other_forward,
        not_frozen_any_more_in_forward,
    )
}


def patterned(how: str, pattern: str) -> Record:
    record = Recorder()
    PATTERNS[pattern](model_of(how), record)
    return record.values


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_frozen_at_other_times(pool_of, pattern, ranks):
    assert_same_as_fsdp2(pool_of(ranks), patterned, pattern)


def aborted(grads: str, fails: bool) -> Record:
    model, record = model_of(grads), Recorder()
    if fails:
        set_trainable(unit(model), False)
        model.set_requires_gradient_sync(False)
        loss_of(model, 0).backward()
        set_trainable(unit(model), True)
        model.run_block = lambda block, x: Explosion.apply(block(x))
        with pytest.raises(Boom):
            loss_of(model, 1).backward()
        model.run_block = lambda block, x: block(x)
        model.set_requires_gradient_sync(True)
        lowtide.abort_step(model)
    loss_of(model, 2).backward()
    record.add_model(model)
    return record.values


@pytest.mark.parametrize("grads", ["exact", "fused"])
def test_a_step_that_failed_leaves_nothing_behind(pool_of, grads):
    failed = pool_of(2).run(aborted, grads, True)
    for mine, other in zip(failed, pool_of(2).run(aborted, grads, False), strict=True):
        assert_same_records(mine, other)


# -- gradients that are kept otherwise -------------------------------------------------


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(37, 4), nn.Linear(4, 128)])

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        embed, out = self.blocks
        return out(embed(indices))


def looked_up(how: str) -> Record:
    record = Recorder()
    with mock.patch.object(embedding, "LARGE_TABLE", 0):
        model = model_of(how, Lookup)
        for step, flags in enumerate(FLAGS):
            for micro, flag in enumerate(flags):
                model.blocks[0].weight.requires_grad_(flag == "1")
                model.set_requires_gradient_sync(micro == len(flags) - 1)
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                indices = torch.randint(37, (9,), generator=generator)
                model(indices).pow(2).sum().backward()
            record.add_model(model)
            model.zero_grad()
    return record.values


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_a_large_embedding(pool_of, ranks):
    assert_same_as_fsdp2(pool_of(ranks), looked_up)


def over_replicas(how: str) -> Record:
    """FSDP2 raises if other parameters train when it sums over the replicas what it
    kept: it sums at once what is frozen afterwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model, record = model_of(how, mesh=mesh), Recorder()
    for step in range(3):
        for micro in range(2):
            if how != "fsdp2":
                model.set_requires_all_reduce(micro == 1)
                set_trainable(single(model), micro == 0)
            loss_of(model, 10 * step + micro).backward()
            if micro == 0 and how == "fsdp2":
                for i, parameter in enumerate(single(model)):
                    record.add(f"{i}", parameter.grad)
        if how != "fsdp2":
            for i, parameter in enumerate(single(model)):
                record.add(f"{i}", parameter.grad)
        model.zero_grad()
    return record.values


def test_kept_until_the_replicas_are_summed(pool_of):
    assert_same_as_fsdp2(pool_of(4), over_replicas)
