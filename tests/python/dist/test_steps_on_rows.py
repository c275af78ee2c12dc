"""Elementwise optimizers of sharded parameters step rows: the bits and states of a step
on DTensors, with none of their calls."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from support.bits import assert_same_tensors
from support.model import TINY, build
from support.optimizers import ELEMENTWISE
from support.systems import get_system
from support.training import Run, accumulate, local, shard

RUN = Run(TINY, 2, microbatches=2)


class OfDTensors(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and states, which are DTensors where parameters are."""
    found = {name: local(p).clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            if isinstance(p, DTensor) and torch.is_tensor(value) and value.dim() > 0:
                assert isinstance(value, DTensor) and value._spec == p._spec, key
            found[f"{name} {key}"] = local(torch.as_tensor(value)).clone()
    return found


def train(system: str, name: str, settings: dict[str, Any]) -> Any:
    """Two steps; states out and in again; a parameter without a gradient; one more."""
    torch.manual_seed(0)
    model: Any = shard(build(RUN.model), RUN, get_system(system))
    optimizer = ELEMENTWISE[name](model.parameters(), **settings)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    calls = OfDTensors()
    found = []
    for step in range(4):
        accumulate(model, RUN, step, 0)
        if step == 3:
            model.norm.weight.grad = None
        with calls:
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        entries = torch.tensor(sorted(optimizer.state_dict()["state"]))
        found.append({"entries": entries} | everything(model, optimizer))
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return found, calls.names


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_has_the_bits_of_dtensors(pool_of, name, foreach):
    pool = pool_of(2)
    ours = pool.run(train, "lowtide", name, {"foreach": foreach})
    theirs = pool.run(train, "fsdp2", name, {"foreach": foreach})
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert other[1] and not one[1]
        for step, (actual, expected) in enumerate(zip(one[0], other[0], strict=True)):
            assert_same_tensors(actual, expected, f"rank {rank}, step {step}")


def step_rprop() -> bool:
    """It indexes, which DTensors refuse; beside one of plain copies."""
    model: Any = shard(build(RUN.model), RUN, get_system("lowtide"))
    copies = [nn.Parameter(local(p).clone()) for p in model.parameters()]
    ours, theirs = torch.optim.Rprop(model.parameters()), torch.optim.Rprop(copies)
    for step in range(3):
        accumulate(model, RUN, step, 0)
        for copied, p in zip(copies, model.parameters(), strict=True):
            copied.grad = local(p.grad).clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    pairs = zip(copies, model.parameters(), strict=True)
    return all(torch.equal(copied, local(p)) for copied, p in pairs)


def test_rprop_steps(pool_of):
    assert pool_of(2).run(step_rprop) == [True] * 2


def raise_midway() -> list[Any]:
    """In its second group."""
    model: Any = shard(build(RUN.model), RUN, get_system("lowtide"))
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    accumulate(model, RUN, 0, 0)
    before = everything(model, optimizer)
    broken = optimizer.param_groups[1].pop("betas")
    found = []
    try:
        with lowtide.step(model, optimizer):
            optimizer.step()
    except KeyError as error:
        found.append(str(error))
    found.append(not any(optimizer.state.values()))
    after = everything(model, optimizer)
    found.append(all(torch.equal(after[name], before[name]) for name in before))
    optimizer.param_groups[1]["betas"] = broken
    given = [p for group in optimizer.param_groups for p in group["params"]]
    found.append(set(map(id, given)) == set(map(id, model.parameters())))
    accumulate(model, RUN, 0, 0)
    optimizer.step()
    found.append(len(optimizer.state) == len(others) + 1)
    return found


def test_a_step_that_raises_leaves_the_optimizer_as_it_was(pool_of):
    assert pool_of(2).run(raise_midway) == [["'betas'", True, True, True, True]] * 2


def step_as_they_are() -> list[Any]:
    """Gradients of other placements or another mesh, subclasses; and a plain parameter
    beside the sharded ones, which DTensors refuse."""
    found: list[Any] = []
    model: Any = shard(build(RUN.model), RUN, get_system("lowtide"))
    accumulate(model, RUN, 0, 0)
    weight = model.norm.weight
    whole = torch.ones(weight.shape)
    for kind in (torch.optim.SGD, type("Mine", (torch.optim.SGD,), {})):
        optimizer = kind(model.parameters(), lr=1.0)
        weight.grad = DTensor.from_local(whole, weight.device_mesh, [Partial()])
        before = local(weight).clone()
        with OfDTensors() as calls:
            optimizer.step()
        # Two ranks' ones.
        found += [bool(calls.names), bool((before - local(weight) == 2.0).all())]
    weight.grad = None
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    optimizer = torch.optim.SGD([*model.parameters(), plain], lr=1.0, foreach=True)
    with OfDTensors() as calls:
        optimizer.step()
    of_rows = calls.names == []
    try:
        of_another_mesh(model)
    except RuntimeError as error:
        found.append("mesh" in str(error))
    return [*found, of_rows, plain.tolist() == [-1.0] * 3]


def of_another_mesh(model: Any) -> None:
    """A gradient."""
    weight = model.norm.weight
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    there = [Replicate(), Shard(0)]
    weight.grad = DTensor.from_local(torch.ones_like(local(weight)), mesh, there)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_what_rows_do_not_suffice_for_is_stepped_as_it_is(pool_of):
    assert pool_of(2).run(step_as_they_are) == [[True] * 7] * 2


def of_other_placements() -> list[str]:
    """A state; and a gradient, where the program has asked for rows."""
    model: Any = shard(build(RUN.model), RUN, get_system("lowtide"))
    weight, found = model.norm.weight, []
    by_rows = torch.optim.SGD(lowtide.local_parameters(model), lr=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    accumulate(model, RUN, 0, 0)
    whole = torch.ones(weight.shape)
    other = DTensor.from_local(whole, weight.device_mesh, [Replicate()])
    optimizer.state[weight]["momentum_buffer"] = other
    for one in (optimizer, by_rows):
        try:
            one.step()
        except ValueError as error:
            found.append(str(error).split(" of ")[0])
        weight.grad = other
    return found


def test_states_and_gradients_of_other_placements_are_refused(pool_of):
    assert pool_of(2).run(of_other_placements) == 2 * [
        [
            "lowtide: optimizer: expected state 'momentum_buffer'",
            "lowtide: local_parameters: expected a gradient",
        ]
    ]


def moved_rows() -> bool:
    """Storage that is another one is not stepped where it was."""
    model: Any = shard(build(RUN.model), RUN, get_system("lowtide"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(2):
        accumulate(model, RUN, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    weight = model.norm.weight
    weight._local_tensor.data = local(weight).clone()
    before = local(weight).clone()
    accumulate(model, RUN, 2, 0)
    optimizer.step()
    return torch.equal(local(weight), before - local(weight.grad))


def test_rows_that_moved_are_found(pool_of):
    assert pool_of(2).run(moved_rows) == [True] * 2


def gradients_after() -> dict[str, list[int]]:
    """How many gradients are there behind a step, and without references of the
    program's behind that."""
    found = {}

    def count(name: str, step: Callable[[Any], Any]) -> None:
        model: Any = shard(build(RUN.model), RUN, get_system("lowtide"))
        accumulate(model, RUN, 0, 0)
        gradients = [weakref.ref(p.grad._local_tensor) for p in model.parameters()]
        optimizer = step(model)  # still there
        numbers = [sum(each() is not None for each in gradients)]
        for p in model.parameters():
            p.grad = None
        found[name] = [*numbers, sum(each() is not None for each in gradients)]
        del optimizer

    def taken(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        return optimizer

    def raised(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters())
        del optimizer.param_groups[0]["betas"]
        with pytest.raises(KeyError, match="betas"):
            optimizer.step()
        return optimizer

    def raised_on_host(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters())
        lowtide.offload_states(optimizer)
        del optimizer.param_groups[0]["betas"]
        with pytest.raises(KeyError, match="betas"):
            optimizer.step()
        return optimizer

    def as_they_are(model: Any) -> Any:
        weight = list(model.parameters())[-1]
        whole = torch.ones(weight.shape)
        weight.grad = DTensor.from_local(whole, weight.device_mesh, [Partial()])
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.step()
        return optimizer

    def in_bfloat16(model: Any) -> Any:
        for p in model.parameters():
            gradient, p.grad = p.grad.bfloat16(), None
            p.grad_dtype, p.grad = torch.bfloat16, gradient
        optimizer = torch.optim.SGD(model.parameters(), foreach=False)
        optimizer.step()
        return optimizer

    for step in (taken, raised, raised_on_host, as_they_are, in_bfloat16):
        count(step.__name__, step)
    return found


def test_gradients_are_nobodys_behind_a_step(pool_of):
    number = len(list(build(RUN.model).parameters()))
    for found in pool_of(2).run(gradients_after):
        assert found == {
            "taken": [number, 0],
            "raised": [number, 0],
            "raised_on_host": [number, 0],
            "as_they_are": [number - 1, 0],
            "in_bfloat16": [0, 0],
        }


def step_beside_one_that_raised(states_on_host: bool) -> list[bool]:
    """Its traceback goes when the next step has found its gradients."""

    def steps(raises: bool) -> tuple[list[Any], dict[str, Any]]:
        model: Any = shard(build(RUN.model), RUN, get_system("lowtide"))
        optimizer = torch.optim.AdamW(model.parameters())
        if states_on_host:
            lowtide.offload_states(optimizer)
        accumulate(model, RUN, 0, 0)
        kept = []
        if raises:
            betas = optimizer.param_groups[0].pop("betas")
            try:
                optimizer.step()
            except KeyError as error:
                kept.append(error)
            optimizer.param_groups[0]["betas"] = betas

        def let_go(*_: Any) -> None:
            kept.clear()
            gc.collect()

        optimizer.register_step_pre_hook(let_go)
        found = len(kept)
        optimizer.step()
        return [found, len(kept)], everything(model, optimizer)

    (kept, after), (_, expected) = steps(True), steps(False)
    same = [torch.equal(after[name], value) for name, value in expected.items()]
    return [kept == [1, 0], after.keys() == expected.keys(), all(same)]


@pytest.mark.parametrize("states_on_host", [False, True])
def test_a_step_that_raised_takes_nothing_from_the_next(pool_of, states_on_host):
    found = pool_of(2).run(step_beside_one_that_raised, states_on_host)
    assert found == [[True] * 3] * 2
