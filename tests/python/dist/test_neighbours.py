"""Neighbours of a unit step as one tensor: here on CPUs, where it is turned on for
tensors whose elements are all in whole vectors."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import shutil
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator
from operator import gt
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import lowtide
from lowtide._sharding import neighbours
from support.bits import assert_same_tensors
from support.optimizers import ELEMENTWISE
from support.training import local

WIDTH = 128  # of each rank's rows of a bias 64: gradients begin at multiples of that
BLOCKS = 2

OPTIMIZERS = ELEMENTWISE | {"rprop": torch.optim.Rprop}
FUSED = ("adagrad", "adam amsgrad", "adamw", "sgd", "sgd momentum")


class Block(nn.Module):
    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.skips:
            return x
        return x + self.down(self.up(self.norm(x)).tanh())


def build() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for unit in (*model, model):
        lowtide.fully_shard(unit)
    return model


def backward(model: Any, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, WIDTH)).square().sum().backward()


@contextlib.contextmanager
def as_one(on: bool = True) -> Iterator[list[int]]:
    """How many parameters stepped as one, a run at a time; off: as on CPUs."""
    found: list[int] = []
    plain = neighbours.Run.whole

    def counted(run: Any, states: Any) -> Any:
        whole = plain(run, states)
        found.append(len(run.parameters) if whole is not None else 0)
        return whole

    with (
        unittest.mock.patch.object(neighbours, "step_as_one", return_value=on),
        unittest.mock.patch.object(neighbours.Run, "whole", counted),
    ):
        yield found


def everything(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and states, which are DTensors as parameters are."""
    found = {name: local(p).clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if torch.is_tensor(value) and value.dim() > 0:
                assert isinstance(value, DTensor) and value._spec == p._spec, key
                assert local(value).untyped_storage().nbytes() == local(value).nbytes
            found[f"{name} {key}"] = local(torch.as_tensor(value)).clone()
    return found


ALL = 6  # of a block's parameters
ONE, SINGLE = [ALL] * BLOCKS, [0] * BLOCKS


def train(on: bool, name: str, settings: dict[str, Any]) -> Any:
    """Two groups of different rates; a parameter that goes without a gradient; states
    out and in again."""
    model = build()
    make = OPTIMIZERS[name]
    groups = [{"params": [*block.parameters()]} for block in model]
    groups[1]["lr"] = 0.05
    optimizer = make(groups, **settings)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    found, runs = [], []
    with as_one(on) as stepped:
        for step in range(6):
            backward(model, step)
            if step == 3:
                model[0].up.bias.grad = None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            entries = torch.tensor(list(optimizer.state_dict()["state"]))
            found.append({"entries": entries} | everything(model, optimizer))
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            runs.append(sorted(stepped))
            stepped.clear()
    return found, runs


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {"foreach": foreach}) for name in OPTIMIZERS for foreach in (0, 1)),
        *((name, {"fused": True}) for name in FUSED),
    ],
)
def test_has_the_bits_of_single_steps(pool_of, name, settings):
    pool = pool_of(2)
    ones = pool.run(train, True, name, settings)
    singles = pool.run(train, False, name, settings)
    for rank, (one, single) in enumerate(zip(ones, singles, strict=True)):
        for step, (actual, expected) in enumerate(zip(one[0], single[0], strict=True)):
            assert_same_tensors(actual, expected, f"rank {rank}, step {step}")
        assert single[1] == [[]] * 6
        if name == "adagrad":  # whose states are there before
            assert one[1] == [SINGLE] * 6
            continue
        # Of others the counters have parted, and states were loaded.
        behind = ALL if name.startswith("sgd") else 0
        loaded = ONE if name == "sgd" else SINGLE
        assert one[1] == [ONE, ONE, ONE, [0, ALL], [behind, ALL], loaded]


# -- beside what else happens to optimizers -------------------------------------------


class Interrupted(Exception):
    pass


class Training:
    """Of a model by AdamW, steps of which a scenario surrounds."""

    def __init__(self, **settings: Any) -> None:
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        self.number = 0

    def step(self, between: Callable[[], object] = lambda: None) -> None:
        backward(self.model, self.number)
        self.number += 1
        between()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def counters(self) -> list[torch.Tensor]:
        return [state["step"] for state in self.optimizer.state.values()]


def write_one_counter(now: Training) -> None:
    now.counters[3].add_(5)


def write_all_counters(now: Training) -> None:
    for counter in now.counters:
        counter.fill_(7)


def replace_counters(now: Training) -> None:
    for state in now.optimizer.state.values():
        state["step"] = state["step"] + 3


def write_a_moment(now: Training) -> None:
    state = now.optimizer.state[now.model[0].up.weight]
    state["exp_avg"].mul_(0.5)


def replace_a_moment(now: Training) -> None:
    state = now.optimizer.state[now.model[0].up.weight]
    state["exp_avg"] = state["exp_avg"] * 0.5


def clear_states(now: Training) -> None:
    now.optimizer.state.clear()


def forget_one_state(now: Training) -> None:
    del now.optimizer.state[now.model[0].up.weight]


def undo(now: Training) -> None:
    with contextlib.suppress(Interrupted), lowtide.step(now.model, now.optimizer):
        now.step()
        raise Interrupted


def sleep(now: Training) -> None:
    lowtide.sleep(now.model, now.optimizer)
    lowtide.wake(now.model, now.optimizer)


def drop_and_refill(now: Training) -> None:
    optimizer = now.optimizer
    kept = [
        {name: value.clone() for name, value in state.items()}
        for state in optimizer.state.values()
    ]

    def refill() -> None:
        for state, of in zip(optimizer.state.values(), kept, strict=True):
            for name, value in state.items():
                value.copy_(of[name])

    lowtide.sleep(now.model, optimizer, parts=["states"], drop=["states"])
    lowtide.wake(now.model, optimizer, parts=["states"], refill=refill)


def onto_the_host(now: Training) -> None:
    lowtide.offload_states(now.optimizer)


def load_by_torch(now: Training) -> None:
    kept = io.BytesIO()
    torch.save(now.optimizer.state_dict(), kept)
    now.optimizer = torch.optim.AdamW(now.model.parameters())
    kept.seek(0)
    now.optimizer.load_state_dict(torch.load(kept, weights_only=False))


def load_by_names(now: Training) -> None:
    kept = copy.deepcopy(get_optimizer_state_dict(now.model, now.optimizer))
    now.optimizer = torch.optim.AdamW(now.model.parameters())
    set_optimizer_state_dict(now.model, now.optimizer, kept)


def load_by_lowtide(now: Training) -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    lowtide.save(folder[0], now.model, now.optimizer)
    now.model = build()
    now.optimizer = torch.optim.AdamW(now.model.parameters())
    lowtide.load(folder[0], now.model, now.optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def copied(now: Training) -> None:
    """Its states, for a program that goes on with parameters of its own."""
    states = copy.deepcopy(now.optimizer.state_dict())["state"]
    for state, other in zip(now.optimizer.state.values(), states.values(), strict=True):
        for name, value in state.items():
            assert torch.equal(local(value), local(other[name]))
            assert local(value).data_ptr() != local(other[name]).data_ptr()


def set_one_gradient(now: Training) -> None:
    def between() -> None:
        p = now.model[0].up.weight
        p.grad = p.grad * 2

    now.step(between)


def keep_zeros(now: Training) -> None:
    backward(now.model, 99)
    now.optimizer.zero_grad(set_to_none=False)


def clip(now: Training) -> None:
    now.step(lambda: lowtide.clip_grad_norm_(now.model.parameters(), 0.1))


def microbatches(now: Training) -> None:
    now.model.set_requires_gradient_sync(False)
    backward(now.model, 98)
    now.model.set_requires_gradient_sync(True)


def without_a_block(now: Training) -> None:
    def between() -> None:
        for p in now.model[1].parameters():
            p.grad = None

    now.step(between)


def groups_apart(now: Training) -> None:
    """Biases without decay: others lie between them."""
    biases, others = [], []
    for name, p in now.model.named_parameters():
        (biases if name.endswith("bias") else others).append(p)
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
    now.optimizer = torch.optim.AdamW(groups)


def scaled(now: Training) -> None:
    """With an overflow in the second of three steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(3):
        torch.manual_seed(step)
        loss = now.model(torch.randn(4, WIDTH)).square().sum()
        scaler.scale(loss).backward()
        if step == 1:
            local(now.model[1].up.weight.grad).fill_(torch.inf)
        scaler.step(now.optimizer)
        scaler.update()
        now.optimizer.zero_grad()


def raise_midway(now: Training) -> None:
    """Behind its counting."""
    betas = now.optimizer.param_groups[0]["betas"]
    now.optimizer.param_groups[0]["betas"] = (0.9, None)
    with contextlib.suppress(TypeError):
        now.step()
    now.optimizer.zero_grad()
    now.optimizer.param_groups[0]["betas"] = betas


def reshaped(now: Training) -> None:
    """Parameters in other places."""
    now.model.double()
    now.model.float()


# How parameters step behind it.
SCENARIOS: dict[Callable[[Training], None], list[int]] = {
    write_one_counter: [0, ALL],
    write_all_counters: ONE,
    replace_counters: ONE,
    write_a_moment: ONE,
    replace_a_moment: [0, ALL],
    clear_states: ONE,
    forget_one_state: [0, ALL],
    undo: ONE,
    sleep: ONE,
    drop_and_refill: ONE,
    onto_the_host: [],
    load_by_torch: SINGLE,
    load_by_names: SINGLE,
    load_by_lowtide: ONE,
    copied: ONE,
    set_one_gradient: ONE,
    keep_zeros: ONE,
    clip: ONE,
    microbatches: ONE,
    without_a_block: ONE,
    groups_apart: [2, 2, 3, 3],
    scaled: ONE,
    raise_midway: ONE,
    reshaped: ONE,
}


def versions(model: Any) -> list[int]:
    return [p._version + p._local_tensor._version for p in model.parameters()]


def run(
    on: bool, scenario: Callable[[Training], None], settings: dict[str, Any]
) -> Any:
    """Behind the second step, and again: a first one is another."""
    found = []
    with as_one(on) as stepped:
        now = Training(**settings)
        for _ in range(2):
            now.step()
            scenario(now)
            stepped.clear()
            now.step()
            entries = torch.tensor(list(now.optimizer.state_dict()["state"]))
            of_step = {"entries": entries} | everything(now.model, now.optimizer)
            found.append((of_step, sorted(stepped)))
            # Who saved a parameter for a backward is to hear of it.
            before = versions(now.model)
            now.step()
            after = versions(now.model)
            assert all(map(gt, after, before)), (before, after)
    return found


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_beside_what_else_happens(pool_of, scenario, settings):
    pool = pool_of(2)
    ones = pool.run(run, True, scenario, settings)
    singles = pool.run(run, False, scenario, settings)
    for rank, (one, single) in enumerate(zip(ones, singles, strict=True)):
        for time, (actual, expected) in enumerate(zip(one, single, strict=True)):
            assert_same_tensors(actual[0], expected[0], f"rank {rank}, time {time}")
            assert actual[1] == SCENARIOS[scenario], f"rank {rank}, time {time}"


def in_backward(on: bool, settings: dict[str, Any], **clip: Any) -> Any:
    """The third step is undone and done again; a block goes unused in the fourth."""
    found = []
    with as_one(on) as stepped:
        now = Training(**settings)
        lowtide.optimize_in_backward(now.model, now.optimizer, **clip)
        for number in range(5):
            if number == 2:
                undo(now)
                now.number = number
            now.model[1].skips = number == 3
            stepped.clear()
            before = versions(now.model)
            now.step()
            assert number == 3 or all(map(gt, versions(now.model), before))
            found.append((everything(now.model, now.optimizer), sorted(stepped)))
    return found


@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.5, "clip": "late"}], ids=str)
@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}], ids=str)
def test_in_backward(pool_of, settings, clip):
    pool = pool_of(2)
    ones = pool.run(in_backward, True, settings, **clip)
    singles = pool.run(in_backward, False, settings, **clip)
    for rank, (one, single) in enumerate(zip(ones, singles, strict=True)):
        for step, (actual, expected) in enumerate(zip(one, single, strict=True)):
            assert_same_tensors(actual[0], expected[0], f"rank {rank}, step {step}")
        # And none in step() itself, where there are no gradients.
        stepped = [[*filter(None, step)] for _, step in one]
        assert stepped == [ONE, ONE, ONE, [ALL], ONE]


def unused() -> int:
    """How often counters are read where a parameter has no gradient now and then."""
    with (
        as_one(),
        unittest.mock.patch.object(torch, "stack", wraps=torch.stack) as read,
    ):
        now = Training()
        for step in range(6):
            now.step(functools.partial(drop, now.model[0].up.bias, step % 2 == 1))
    return read.call_count


def drop(p: Any, drops: bool) -> None:
    if drops:
        p.grad = None


def test_the_host_does_not_wait_where_parameters_go_unused(pool_of):
    assert pool_of(2).run(unused) == [0, 0]
