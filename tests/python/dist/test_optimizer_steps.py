"""After an optimizer has stepped nobody computes with what was gathered before, and an
optimizer whose parameters are no longer there is noticed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide

X = torch.ones(2, 3)


def network() -> Any:
    torch.manual_seed(0)
    # Of the second and third layer's rows one rank of two has none.
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(1, 1))


def sharded(**options: Any) -> Any:
    model = network()
    for layer in model:
        lowtide.fully_shard(layer, **options)
    return lowtide.fully_shard(model, **options)


# -- what is still gathered is old ----------------------------------------------------


class ByHand:
    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            assert p.grad is not None
            p.sub_(p.grad, alpha=self.lr)


def of_local_parameters(model: Any) -> Any:
    local = isinstance(model, lowtide.FSDPModule)
    parameters = lowtide.local_parameters(model) if local else model.parameters()
    return torch.optim.SGD(parameters, lr=0.05, fused=True)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "foreach": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "one by one": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, foreach=False
    ),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
    "local parameters": of_local_parameters,
    "by hand": lambda model: ByHand(model.parameters(), lr=0.05),
}


def outputs(model: Any, optimizer: Any) -> list[torch.Tensor]:
    seen = []
    for i in range(3):
        model.zero_grad()  # also where the full parameters are shown
        model((i + 1) * X).square().sum().backward()
        with torch.no_grad():
            seen.append(model(X))  # what is not resharded after it stays
        optimizer.step()
        seen.append(model(X).detach())
    return seen


def stale(optimizer: str, options: dict[str, Any]) -> list[bool]:
    rule, model = network(), sharded(**options)
    theirs = outputs(rule, OPTIMIZERS[optimizer](rule))
    ours = outputs(model, OPTIMIZERS[optimizer](model))
    return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_forward_after_a_step_sees_it(pool_of, optimizer, options):
    for of_rank in pool_of(2).run(stale, optimizer, options):
        assert all(of_rank)


# -- graphs of before -----------------------------------------------------------------


class Subclass(torch.optim.AdamW):
    """Whose step is one of DTensors."""


GRAPHS = OPTIMIZERS | {"subclass": lambda model: Subclass(model.parameters(), lr=0.05)}


def go_through_late(optimizer: str) -> list[Any]:
    """Whether a graph is refused whose forward saw the parameters before a step; first
    one of other parameters than were stepped."""
    results: list[Any] = []
    model = sharded()
    x = X.clone().requires_grad_()
    old, of_first = model(x).sum(), model[0](x).sum()
    for layers, late in ((model[2:], of_first), (model, old)):
        model(2 * x).sum().backward()
        GRAPHS[optimizer](layers).step()
        model.zero_grad()
        try:
            late.backward()
            results.append(None)
        except RuntimeError as error:
            results.append("modified by an inplace operation" in str(error))
    return results


@pytest.mark.parametrize("optimizer", GRAPHS)
def test_a_graph_of_before_a_step_is_gone_through_no_more(pool_of, optimizer):
    """As without sharding torch says, but for fused optimizers."""
    assert pool_of(2).run(go_through_late, optimizer) == [[None, True]] * 2


def unsharded_over_a_step() -> list[bool]:
    model, rule = sharded(), network()
    results = []
    for one in (model, rule):
        one(X).sum().backward()
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        if one is model:
            model[0].unshard()
            model[1].unshard(async_op=True)
        optimizer.step()
        if one is model:
            model[0].unshard()
            assert torch.equal(model[0].weight, results_weight(rule))
            model[0].reshard()
        results.append(one(X).detach())
    return [torch.equal(*results)]


def results_weight(rule: Any) -> torch.Tensor:
    stepped = copy.deepcopy(rule)
    stepped(X).sum().backward()
    torch.optim.SGD(stepped.parameters(), lr=0.1).step()
    return stepped[0].weight


def test_a_gather_before_the_step_is_not_used_after_it(pool_of):
    assert pool_of(2).run(unsharded_over_a_step) == [[True], [True]]


def gathers_of_a_teacher() -> int:
    teacher, student = sharded(reshard_after_forward=False), sharded()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    pointers = set()
    for _ in range(3):
        with torch.no_grad():
            target = teacher(X)
        pointers.add(teacher[0].weight.data_ptr())
        (student(X) - target - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(teacher[0].weight) is nn.Parameter
    return len(pointers)


def test_what_another_optimizer_steps_stays_gathered(pool_of):
    assert pool_of(2).run(gathers_of_a_teacher) == [1, 1]


# -- parameters that are no longer there ----------------------------------------------


def messages_of(steps: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    return [str(w.message) for w in caught if "lowtide" in str(w.message)]


def made_before_wrapping() -> list[str]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in model:
        lowtide.fully_shard(layer)
    lowtide.fully_shard(model)

    def steps() -> None:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()

    return messages_of(steps)


def kept_after_assign() -> list[str]:
    model = sharded()
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adam(lowtide.local_parameters(model), lr=0.1),
    ]

    def steps() -> None:
        for i in range(4):
            model(X).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            if i == 1:
                values = {k: v.clone() for k, v in model.state_dict().items()}
                model.load_state_dict(values, assign=True)

    return messages_of(steps)


def of_parameters_that_are_there() -> list[str]:
    model, other = sharded(), nn.Linear(3, 3)
    switched = network()
    late = torch.optim.SGD(switched.parameters(), lr=0.1)
    lowtide.fully_shard(switched)
    late.param_groups[0]["params"] = list(switched.parameters())
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adam(lowtide.local_parameters(model), lr=0.1),
        torch.optim.SGD(other.parameters(), lr=0.1),
        late,
    ]

    def steps() -> None:
        (model(X).sum() + other(X).sum() + switched(X).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.load_state_dict(model.state_dict())
        model.to("cpu")
        for optimizer in optimizers:
            optimizer.step()

    return messages_of(steps)


def test_an_optimizer_made_before_wrapping_is_noticed_once(pool_of):
    for messages in pool_of(2).run(made_before_wrapping):
        assert messages == [
            "lowtide: SGD: expected the model's sharded parameters, got 6 of 6 that "
            "are not: gathered ones, or what fully_shard or "
            "load_state_dict(assign=True) has replaced, the first is '0.weight'. Steps "
            "do not change the model: make the optimizer again, of model.parameters() "
            "before a forward."
        ]


def test_an_optimizer_kept_after_assign_is_noticed_once(pool_of):
    for sgd, adam in pool_of(2).run(kept_after_assign):
        assert sgd.startswith("lowtide: SGD: expected the model's sharded parameters")
        assert adam.startswith("lowtide: Adam: ")


def made_of_gathered_parameters() -> list[str]:
    model = sharded()
    model(X).sum().backward()
    model[0].unshard()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[0].reshard()
    return messages_of(optimizer.step)


def test_an_optimizer_of_gathered_parameters_is_noticed(pool_of):
    for (message,) in pool_of(2).run(made_of_gathered_parameters):
        assert "got 2 of 2 that are not" in message


def test_others_are_not(pool_of):
    assert pool_of(2).run(of_parameters_that_are_there) == [[], []]


def test_ranks_agree_on_what_is_old(pool_of):
    """One of them steps nothing: all its rows are padding."""
    for of_rank in pool_of(2).run(only_the_last_layer):
        assert all(of_rank)


def only_the_last_layer() -> list[bool]:
    results = []
    for model in (network(), sharded(reshard_after_forward=False)):
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        seen = []
        for _ in range(2):
            model(X).sum().backward()
            with torch.no_grad():
                model(X)
            optimizer.step()
            seen.append(model(X).detach())
            dist.barrier()
        results.append(seen)
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]
