"""Where FSDP2 goes wrong without an error, or does too much, beside what lowtide does.

Weights tied over units: test_tied_weights.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from support.bits import same_bits
from support.bombs import Boom, Explosion
from support.systems import get_system
from support.training import local


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.blow and i == 1:
                x = Explosion.apply(x)
        return x


def sharded(system_name: str, model: Any, children: Any) -> Any:
    system = get_system(system_name)
    for child in children:
        system.fully_shard(child)
    return system.fully_shard(model)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [local(p).clone() for p in model.parameters()]


# -- a graph of before a step ---------------------------------------------------------


def late_backward(system_name: str) -> Any:
    """Of a graph whose forward was before the optimizer's step."""
    torch.manual_seed(0)
    model = Net()
    model = sharded(system_name, model, model.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(2, 4, requires_grad=True)
    first, second = model(x).sum(), model(x).sum()
    model(2 * x).sum().backward()
    x.grad = None
    first.backward()
    expected, x.grad = x.grad, None
    optimizer.step()
    try:
        second.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return torch.equal(x.grad, expected)


def test_a_graph_of_before_a_step_does_not_give_other_gradients(pool_of):
    """Where one process alone raises, FSDP2 takes the new weights for the old."""
    assert pool_of(2).run(late_backward, "lowtide") == [True] * 2
    assert pool_of(2).run(late_backward, "fsdp2") == [False] * 2


# -- an exception in backward -------------------------------------------------------


def train_through_an_exception(system_name: str, explode: bool) -> list[Any]:
    """Parameters after each step; step 1 raises in backward, or is left out."""
    torch.manual_seed(0)
    model = Net()
    model = sharded(system_name, model, model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    history = []
    for step in range(4):
        x = torch.full((2, 4), float(step + dist.get_rank()))
        if step == 1:
            if explode:
                model.blow = True
                with pytest.raises(Boom):
                    model(x).sum().backward()
                model.blow = False
                optimizer.zero_grad()
            continue
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(parameters_of(model))
    return history


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fsdp2_stops_updating_after_an_exception_in_backward(pool_of, num_ranks):
    """The two layers below the one that raised are never updated again."""
    runs = pool_of(num_ranks).run(train_through_an_exception, "fsdp2", True)
    for _, second, third in runs:
        stuck = [same_bits(a, b) for a, b in zip(second, third, strict=True)]
        assert sum(stuck) == 4


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_lowtide_goes_on_as_if_the_step_had_been_skipped(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    failed = pool.run(train_through_an_exception, "lowtide", True)
    skipped = pool.run(train_through_an_exception, "lowtide", False)
    for mine, expected in zip(failed, skipped, strict=True):
        for step, other in zip(mine, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(step, other, strict=True))
        assert not any(same_bits(a, b) for a, b in zip(mine[1], mine[2], strict=True))


# -- two parameters of one size, used on different ranks ----------------------------


class Experts(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList(
            nn.Linear(4, 4, bias=False) for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](self.stem(x))


def use_one_expert_each(system_name: str) -> list[torch.Tensor | None]:
    """Full gradients of all experts; rank r uses expert r with the input r + 1."""
    torch.manual_seed(0)
    model = sharded(system_name, Experts(dist.get_world_size()), [])
    rank = dist.get_rank()
    with torch.no_grad():
        for p in model.stem.parameters():
            p.fill_(0.25)
    model(torch.full((1, 4), rank + 1.0), rank).sum().backward()
    grads = [expert.weight.grad for expert in model.experts]
    return [None if g is None else g.full_tensor() for g in grads]


def expected_gradients(num_ranks: int) -> list[torch.Tensor]:
    """Each rank's own gradient, averaged with nothing of the others'."""
    values = [0.25 + 4 * 0.25 * (rank + 1.0) for rank in range(num_ranks)]
    return [torch.full((4, 4), value / num_ranks) for value in values]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fsdp2_mixes_gradients_of_experts_used_on_different_ranks(pool_of, num_ranks):
    by_rank = pool_of(num_ranks).run(use_one_expert_each, "fsdp2")
    mixed = sum(expected_gradients(num_ranks))
    assert isinstance(mixed, torch.Tensor)
    for rank, grads in enumerate(by_rank):
        # Each rank has one gradient, that of the expert it used: the sum of all.
        assert sum(grad is not None for grad in grads) == 1
        assert same_bits(grads[rank], mixed)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_lowtide_keeps_them_apart(pool_of, num_ranks):
    for grads in pool_of(num_ranks).run(use_one_expert_each, "lowtide"):
        for grad, expected in zip(grads, expected_gradients(num_ranks), strict=True):
            assert same_bits(grad, expected)


# -- a unit called twice, after a microbatch without sync ---------------------------


class Recurrent(nn.Module):
    """One block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.block = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(torch.tanh(self.block(self.stem(x)))))


def microbatch(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return torch.randn(3, 4, generator=generator)


def accumulated(system_name: str) -> torch.Tensor:
    """The full gradient of the block's weight after two microbatches."""
    torch.manual_seed(0)
    model = Recurrent()
    model = sharded(system_name, model, [model.block])
    for index in range(2):
        model.set_requires_gradient_sync(index == 1)
        model(microbatch(index)).sum().backward()
    return model.block.weight.grad.full_tensor()


def reduced(apart: bool) -> torch.Tensor:
    """The same by hand: every microbatch averaged over ranks, or their sum."""
    torch.manual_seed(0)
    model = Recurrent()
    gradients = []
    for index in range(2):
        model(microbatch(index)).sum().backward()
        gradients.append(model.block.weight.grad)
        model.zero_grad()
    means = gradients if apart else [gradients[0] + gradients[1]]
    for gradient in means:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return means[0] + means[1] if apart else means[0]


def test_a_unit_called_twice_is_reduced_once_where_fsdp2_reduces_it_apart(pool_of):
    """FSDP2 sends what was accumulated after the first call, the rest after the second:
    two collectives, and other last digits."""
    pool = pool_of(2)
    apart, together = pool.run(reduced, True), pool.run(reduced, False)
    assert not same_bits(apart[0], together[0])
    for mine, expected in zip(pool.run(accumulated, "lowtide"), together, strict=True):
        assert same_bits(mine, expected)
    for theirs, expected in zip(pool.run(accumulated, "fsdp2"), apart, strict=True):
        assert same_bits(theirs, expected)


# -- NaN on one rank ----------------------------------------------------------------


def step_with_a_nan(system_name: str, skip: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    model = sharded(system_name, model, model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    def state() -> list[torch.Tensor]:
        moments = [
            local(value).clone()
            for p in model.parameters()
            for value in optimizer.state[p].values()
        ]
        return [*parameters_of(model), *moments]

    def step(x: torch.Tensor) -> float:
        model(x).sum().backward()
        if skip:
            norm = lowtide.clip_grad_norm_(model.parameters(), 1.0, skip_nonfinite=True)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm.full_tensor().item()

    step(torch.ones(2, 4))
    before = state()
    x = torch.ones(2, 4)
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    norm = step(x)
    after = state()
    step(torch.ones(2, 4))
    return {
        "norm is NaN": norm != norm,
        "unchanged": all(same_bits(a, b) for a, b in zip(before, after, strict=True)),
        "NaN left": sum(int(t.isnan().sum()) for t in parameters_of(model)),
        "trained on": not any(
            same_bits(a, b)
            for a, b in zip(after[:6], parameters_of(model), strict=True)
        ),
        "elements": sum(t.numel() for t in parameters_of(model)),
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fsdp2_turns_every_parameter_into_nan(pool_of, num_ranks):
    for facts in pool_of(num_ranks).run(step_with_a_nan, "fsdp2", False):
        assert facts["norm is NaN"]
        assert facts["NaN left"] == facts["elements"] > 0


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("system", ["lowtide", "fsdp2"])
def test_all_ranks_skip_the_step_together(pool_of, num_ranks, system):
    for facts in pool_of(num_ranks).run(step_with_a_nan, system, True):
        assert facts["norm is NaN"] and facts["unchanged"] and facts["trained on"]
        assert facts["NaN left"] == 0


def clipped(how: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    model = sharded("lowtide", model, model.layers)
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    clip = nn.utils.clip_grad_norm_
    if how != "torch":
        clip = lowtide.clip_grad_norm_
    settings = {"skip_nonfinite": True} if how == "skipping" else {}
    norm = clip(model.parameters(), 0.1, **settings)
    assert norm.full_tensor() > 0.1
    return [local(p.grad).clone() for p in model.parameters()], local(norm)


@pytest.mark.parametrize("how", ["lowtide", "skipping"])
def test_finite_gradients_are_clipped_as_torch_does(pool_of, how):
    pool = pool_of(2)
    for mine, theirs in zip(
        pool.run(clipped, how), pool.run(clipped, "torch"), strict=True
    ):
        assert same_bits(mine[1], theirs[1])
        assert all(same_bits(a, b) for a, b in zip(mine[0], theirs[0], strict=True))
