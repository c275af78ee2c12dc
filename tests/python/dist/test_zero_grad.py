"""Gradients that wait for a reduction are dropped by what drops them without sharding:
any zero_grad, ``p.grad = None``, a checkpoint's tensors in the place of parameters; and
by nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """On this rank, of a sharded model or of its own whole one by the rule: gradients
    of all microbatches are added, then averaged over the ranks."""

    def __init__(self, *, sharded: bool, local: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.sharded = sharded
        if sharded:
            for layer in self.model.layers:
                lowtide.fully_shard(layer, **options)
            lowtide.fully_shard(self.model, **options)
        self.local = local
        self.make_optimizer()

    def make_optimizer(self) -> None:
        parameters = (
            lowtide.local_parameters(self.model)
            if self.sharded and self.local
            else self.model.parameters()
        )
        self.optimizer = torch.optim.SGD(parameters, lr=0.5)

    def microbatch(self, seed: int, *, sync: bool) -> None:
        if self.sharded:
            self.model.set_requires_gradient_sync(sync)
        generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
        x = torch.randn(4, 5, generator=generator)
        self.model(x).square().sum().backward()
        if sync and not self.sharded:
            for p in self.model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[torch.Tensor]:
        return [
            p.full_tensor() if self.sharded else p.detach()
            for p in self.model.parameters()
        ]


Clear = Callable[[Training], None]


def every_parameter(run: Training) -> None:
    for p in run.model.parameters():
        p.grad = None


def with_its_own_zero_grad(run: Training) -> None:
    class Plain(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.zero_()

    Plain(run.model.parameters(), lr=1.0).zero_grad()


def on_one_rank(run: Training) -> None:
    if dist.get_rank() == 0:
        run.optimizer.zero_grad(set_to_none=False)
        if not run.sharded:
            run.model.zero_grad(set_to_none=False)


def load(run: Training, *, copy: bool) -> None:
    state = run.model.state_dict()
    if copy:
        state = {name: value.clone() for name, value in state.items()}
    run.model.load_state_dict(state, assign=True)
    run.make_optimizer()


def before_a_move(run: Training) -> None:
    run.optimizer.zero_grad()
    run.model.to("cpu")


def nothing(run: Training) -> None:
    """What reads gradients, moves a model to where it is, loads values into its
    parameters, and what clears the gradients of another model."""
    assert all(p.grad is None for p in run.model.parameters()) or not run.sharded
    if run.sharded:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
    run.model.load_state_dict(run.model.state_dict())
    run.model.to("cpu").cpu()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    other.zero_grad()


CLEARS: dict[str, Clear] = {
    "optimizer": lambda run: run.optimizer.zero_grad(),
    "optimizer to zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "model": lambda run: run.model.zero_grad(),
    "model to zeros": lambda run: run.model.zero_grad(set_to_none=False),
    "unit": lambda run: run.model.layers[1].zero_grad(),
    "submodule": lambda run: run.model.layers[1][0].zero_grad(),
    "every parameter": every_parameter,
    "one parameter": lambda run: setattr(run.model.layers[2][0].bias, "grad", None),
    "own zero_grad": with_its_own_zero_grad,
    "one rank": on_one_rank,
    "assigned checkpoint": functools.partial(load, copy=True),
    "assigned own state": functools.partial(load, copy=False),
    "before a move": before_a_move,
    "nothing": nothing,
}


def accumulate(run: Training, clear: Clear) -> list[torch.Tensor]:
    run.microbatch(1, sync=True)
    run.step()
    run.microbatch(2, sync=False)
    run.microbatch(3, sync=False)
    clear(run)
    run.microbatch(4, sync=False)
    run.microbatch(5, sync=True)
    run.step()
    run.microbatch(6, sync=True)  # nothing is left
    run.step()
    return run.parameters()


def differing(name: str, options: dict[str, Any]) -> list[int]:
    rule = accumulate(Training(sharded=False), CLEARS[name])
    ours = accumulate(Training(sharded=True, **options), CLEARS[name])
    pairs = enumerate(zip(ours, rule, strict=True))
    return [i for i, (a, b) in pairs if not torch.equal(a, b)]


@pytest.mark.parametrize("name", CLEARS)
def test_what_waits_is_dropped_as_without_sharding(pool_of, name):
    assert pool_of(2).run(differing, name, {}) == [[], []]


@pytest.mark.parametrize("name", ["optimizer", "every parameter", "nothing"])
def test_by_an_optimizer_of_local_parameters(pool_of, name):
    assert pool_of(2).run(differing, name, {"local": True}) == [[], []]


def while_the_full_parameters_are_shown() -> bool:
    results = []
    for poison in (False, True):
        run = Training(sharded=True)
        run.model.set_reshard_after_backward(False)
        if poison:
            run.microbatch(1, sync=False)
            run.model.zero_grad()
        run.microbatch(2, sync=False)
        run.model.set_reshard_after_backward(True)
        run.microbatch(3, sync=True)
        run.step()
        results.append(run.parameters())
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_while_the_full_parameters_are_shown(pool_of):
    assert pool_of(2).run(while_the_full_parameters_are_shown) == [True, True]


def partial_results() -> bool:
    """Reduced over the shards, not yet over the replicas."""
    results = []
    for poison in (False, True):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
        run = Training(sharded=True, mesh=mesh)
        if poison:
            run.model.set_requires_all_reduce(False)
            run.microbatch(1, sync=False)
            for layer in run.model.layers:
                layer.set_requires_gradient_sync(True)
            run.model.set_requires_all_reduce(False)
            run.microbatch(2, sync=True)
            run.optimizer.zero_grad()
        run.model.set_requires_all_reduce(True)
        run.microbatch(3, sync=True)
        run.step()
        results.append(run.parameters())
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_results_that_wait_for_the_replicas(pool_of):
    assert pool_of(2).run(partial_results) == [True, True]


def in_a_hook(system_name: str) -> list[torch.Tensor]:
    """An optimizer in backward clears what it has just used, and nothing more."""
    run = Training(sharded=True)
    for p in run.model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.5)

        def hook(_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    rule = Training(sharded=False)
    for one in (run, rule):
        for step in range(2):
            one.microbatch(2 * step, sync=False)
            one.microbatch(2 * step + 1, sync=True)
            if not one.sharded:
                one.step()
    return [a - b for a, b in zip(run.parameters(), rule.parameters(), strict=True)]


def test_an_optimizer_in_backward(pool_of):
    for differences in pool_of(2).run(in_a_hook, "lowtide"):
        assert all(not difference.any() for difference in differences)
