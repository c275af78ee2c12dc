"""``state_dict`` and ``load_state_dict`` as FSDP2 has them: what goes in, and what is
said when it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.bits import same_bits
from support.model import TINY, batch, build, loss_fn
from support.systems import get_system
from support.training import Run, Trace, adamw, shard, train_step


def make(system: str, seed: int) -> Any:
    return shard(
        build(TINY, seed), Run(TINY, dist.get_world_size()), get_system(system)
    )


def describe(system: str) -> list[tuple[Any, ...]]:
    return [
        (name, type(value).__name__, value.placements, tuple(value.shape), value.dtype)
        for name, value in make(system, 0).state_dict().items()
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_state_dict_looks_like_fsdp2s(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    assert pool.run(describe, "lowtide") == pool.run(describe, "fsdp2")


def losses_before_and_after(system: str, assign: bool) -> list[torch.Tensor]:
    """On the same batch: of the saved model, and of one that ran before it loaded the
    saved one's state; then one step further."""
    run = Run(TINY, dist.get_world_size())
    source, target = make(system, 0), make(system, 1)
    train_step(target, adamw(target), run, 0, Trace())
    state = {name: value.clone() for name, value in source.state_dict().items()}
    target.load_state_dict(state, assign=assign)
    inputs, targets = batch(TINY, 0, 0, dist.get_rank())
    losses = [loss_fn(model(inputs), targets) for model in (source, target)]
    trace = Trace()
    train_step(target, adamw(target), run, 1, trace)
    losses.append(torch.tensor(trace.losses))
    losses += [p.to_local().detach().clone() for p in target.parameters()]
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("assign", [False, True], ids=("copy", "assign"))
def test_what_was_loaded_is_trained_on(pool_of, assign, num_ranks):
    pool = pool_of(num_ranks)
    ours = pool.run(losses_before_and_after, "lowtide", assign)
    theirs = pool.run(losses_before_and_after, "fsdp2", assign)
    for mine, other in zip(ours, theirs, strict=True):
        assert same_bits(mine[0], mine[1])
        assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True))


def load_what_does_not_fit(system: str) -> list[str]:
    model = make(system, 0)
    before = [p.to_local().clone() for p in model.parameters()]
    state = model.state_dict()
    del state["norm.weight"]
    state["more"] = torch.ones(1)
    texts = [str(model.load_state_dict(state, strict=False))]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        texts.append(str(error))
    after = [p.to_local() for p in model.parameters()]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))
    return texts


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_strict_names_what_is_missing_and_unexpected(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    ours = pool.run(load_what_does_not_fit, "lowtide")
    assert ours == pool.run(load_what_does_not_fit, "fsdp2")
    loose, strict = ours[0]
    assert "missing_keys=['norm.weight'], unexpected_keys=['more']" in loose
    assert 'Missing key(s) in state_dict: "norm.weight"' in strict
    assert 'Unexpected key(s) in state_dict: "more"' in strict
