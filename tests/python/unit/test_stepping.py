"""What ``lowtide.step`` brings back of optimizers, others' among them, in one process
and of a model that nobody sharded."""

from __future__ import annotations

import copy
import signal
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.saving.background import bytes_of
from lowtide.stepping.remembered import Remembered
from support.bombs import Boom


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def loss(model: nn.Module) -> Tensor:
    return model(torch.arange(12.0).view(3, 4)).square().sum()


def contents(model: nn.Module, optimizer: Any) -> Any:
    return copy.deepcopy(
        (
            dict(model.state_dict()),
            [p.grad for p in model.parameters()],
            optimizer.state_dict(),
            {k: v for k, v in vars(optimizer).items() if isinstance(v, int | float)},
        )
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Counts(torch.optim.SGD):
    """Keeps what it knows wherever an optimizer may."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=torch.tensor(0.1), momentum=0.9)
        self.steps = 0
        self.losses: list[float] = []
        self.known: set[int] = set()
        self.recent: deque[int] = deque(maxlen=2)
        self.average = torch.zeros(2)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.losses.append(float(self.steps))
        self.known.add(self.steps)
        self.recent.append(self.steps)
        self.average += self.steps
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        group["lr"].mul_(0.5)
        result = super().step(closure)
        for p in group["params"]:
            state = self.state[p]
            state["history"] = [*state.get("history", []), p.detach().clone()]
            state["momentum_buffer"] = state["momentum_buffer"].clone()  # another
        return result


def accelerated(model: nn.Module) -> Any:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    return AcceleratedOptimizer(torch.optim.AdamW(model.parameters()))


@pytest.fixture
def forget_accelerate() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)


OPTIMIZERS: dict[str, Any] = {
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3),
    "counts": lambda m: Counts(m.parameters()),
    "accelerate": accelerated,
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
}


def one_step(model: nn.Module, optimizer: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    closure()
    optimizer.step(closure)


def one_step_that_raises(model: nn.Module, optimizer: Any) -> None:
    with lowtide.step(model, optimizer):
        one_step(model, optimizer)
        raise Boom("late")


@pytest.mark.usefixtures("forget_accelerate")
@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_that_an_optimizer_knows_comes_back(name: str, known: int) -> None:
    def train(broken: bool) -> Any:
        model = network()
        optimizer = OPTIMIZERS[name](model)
        for _ in range(known):
            one_step(model, optimizer)
        if broken:
            before = contents(model, optimizer)
            states = {k: id(v) for k, v in optimizer.state.items()}
            with pytest.raises(Boom):
                one_step_that_raises(model, optimizer)
            assert same(contents(model, optimizer), before)
            assert states == {k: id(v) for k, v in optimizer.state.items()}
        for _ in range(2):
            one_step(model, optimizer)
        return contents(model, optimizer)

    assert same(train(True), train(False))


def test_hooks_that_the_block_registers_stay() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    called = []

    def register() -> None:
        with lowtide.step(model, optimizer):
            optimizer.register_step_post_hook(lambda *_: called.append(1))
            raise Boom("late")

    with pytest.raises(Boom):
        register()
    optimizer.step()
    assert called == [1]


def test_frozen_parameters_are_not_copied() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    remembered = Remembered(model, [optimizer])
    of_all = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    frozen = model[0].weight.nbytes
    assert bytes_of(remembered._tensors) == of_all - frozen + buffers


def test_a_scheduler_behind_the_block_counts_what_happened() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number in range(3):
        try:
            with lowtide.step(model, optimizer):
                one_step(model, optimizer)
                if number == 1:
                    raise Boom("late")
        except Boom:
            continue
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25 and scheduler.last_epoch == 2


def test_handlers_are_the_programs_in_the_block_and_behind_it() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        with lowtide.step(model, optimizer):
            signal.raise_signal(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is own
        with lowtide.step(model, optimizer):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # the block's
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
