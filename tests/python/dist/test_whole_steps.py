"""``lowtide.step`` around forward, backward and the optimizer: what is raised where,
ranks that do not come, interrupts while it is decided, and memory that is refused."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide import stepping
from lowtide._activation.regions import regions
from lowtide._base import memory
from lowtide.stepping import StepUndone
from lowtide.stepping.remembered import Remembered
from support.bits import assert_same_tensors
from support.bombs import Bombs, Boom
from support.breaking import BreaksAt
from support.ranks import RankPool
from support.saving import shards

STEPS, FAILING = 4, 1


class Net(nn.Module):
    """With random numbers, and buffers that forward writes and replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.last = nn.Linear(10, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.3))


class Training:
    def __init__(self, microbatches: int = 2) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.bombs = Bombs(self.model)
        for unit in (self.model.first, self.model.last, self.model):
            lowtide.fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        self.microbatches = microbatches
        self.breaks: Any = contextlib.nullcontext()  # of the next optimizer's step

    def whole_step(self, number: int) -> None:
        for microbatch in range(self.microbatches):
            self.model.set_requires_gradient_sync(microbatch == self.microbatches - 1)
            generator = torch.Generator().manual_seed(10 * number + microbatch)
            x = torch.randn(4, 6, generator=generator)
            self.model(x).pow(2).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        breaks, self.breaks = self.breaks, contextlib.nullcontext()
        with breaks:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor | None]:
        return shards(self.model, self.optimizer)

    def all_steps(self, skip: int | None = None) -> dict[str, torch.Tensor | None]:
        for number in range(STEPS):
            if number != skip:
                self.whole_step(number)
        return self.state()


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def check(results: list[list[tuple[Any, Any]]]) -> None:
    for rank, pairs in enumerate(results):
        for number, (got, expected) in enumerate(pairs):
            assert_same_tensors(got, expected, f"pair {number} of rank {rank}")


# -- what is raised where -------------------------------------------------------------


def attempt(training: Training, number: int, breaks: BreaksAt | None = None) -> Any:
    """What was raised."""
    try:
        with lowtide.step(training.model, training.optimizer):
            training.whole_step(number)
            if breaks is not None:
                raise Boom("behind it")
    except (Boom, StepUndone) as error:
        return error
    return None


def raise_everywhere() -> list[tuple[Any, Any]]:
    skipped = Training().all_steps(skip=FAILING)
    unbroken = Training().all_steps()
    pairs = []
    places = [(place, when) for place in ("first", "last") for when in WHEN]
    for place, when in [*places, (None, "")]:
        for again in (False, True):
            training = Training()
            for number in range(STEPS):
                if number == FAILING:
                    before = training.state()
                    if place is not None:
                        training.bombs.arm(place, when)  # on all ranks
                        error: Any = attempt(training, number)
                    else:
                        error = attempt(training, number, is_last() or None)
                    kind = Boom if place is not None or is_last() else StepUndone
                    assert isinstance(error, kind), error
                    pairs.append((training.state(), before))
                if number != FAILING or again:
                    training.whole_step(number)
            pairs.append((training.state(), unbroken if again else skipped))
    return pairs


WHEN = ("forward", "backward")


def test_what_raises_anywhere_did_not_happen(pool_of):
    check(pool_of(2).run(raise_everywhere))


def gradients_that_were_there() -> list[tuple[Any, Any]]:
    """Changed in place in the block, then freed."""
    training = Training(microbatches=1)
    training.whole_step(0)
    training.model(torch.ones(4, 6)).sum().backward()
    before = training.state()
    try:
        with lowtide.step(training.model, training.optimizer):
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
            training.optimizer.step()
            training.optimizer.zero_grad()
            if is_last():
                raise Boom("late")
    except (Boom, StepUndone):
        pass
    return [(training.state(), before)]


def test_gradients_come_back(pool_of):
    check(pool_of(2).run(gradients_that_were_there))


def begin_between_microbatches() -> str:
    training = Training()
    training.model.set_requires_gradient_sync(False)
    training.model(torch.ones(4, 6)).sum().backward()
    try:
        with lowtide.step(training.model, training.optimizer):
            pass
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_step_begins_before_its_microbatches(pool_of):
    for text in pool_of(2).run(begin_between_microbatches):
        assert text == (
            "lowtide: step: expected unit 'Net' without gradients that wait for a "
            "reduction, got some of earlier microbatches, which could not come back. "
            "Begin the step before the first microbatch."
        )


# -- ranks that do not come -----------------------------------------------------------


def leave_in_the_block(how: str) -> Any:
    training = Training()
    training.whole_step(0)
    training.model(torch.ones(4, 6)).sum().backward()
    before = training.state()
    try:
        with lowtide.step(training.model, training.optimizer):
            training.optimizer.step()
            if is_last():
                os.kill(os.getpid(), getattr(signal, how))
    except StepUndone as error:
        assert_same_tensors(training.state(), before, "undone")
        return str(error)
    return None


@pytest.mark.parametrize(
    "how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)]
)
def test_a_rank_that_is_gone_undoes_the_step(how):
    with RankPool(2, group_timeout=3.0) as pool:
        left, gone = pool.outcomes(leave_in_the_block, how, timeout=8)
    assert left.kind == "value", left
    assert left.value.startswith(
        "lowtide: step: expected all 2 ranks to finish the step, got on rank 0: "
        "'TimeoutError: 1 of 2 ranks after 3 s' (rank 0). It did not happen"
    ), left.value
    assert gone.kind == ("died" if how == "SIGKILL" else "timeout")


# -- interrupts -----------------------------------------------------------------------


def interrupt_while_waiting(handler: str) -> Any:
    """Rank 0 is through and waits for rank 1, which waits for what becomes of it."""
    training = Training()
    training.whole_step(0)
    training.model(torch.ones(4, 6)).sum().backward()
    before = training.state()
    store = dist.distributed_c10d._get_default_store()
    key = f"interrupted/{handler}"
    heard: list[int] = []

    def note(number: int, frame: Any) -> None:
        heard.append(number)
        store.set(key, "")

    previous = signal.signal(signal.SIGINT, note) if handler == "notes" else None
    block = lowtide.step(training.model, training.optimizer)
    try:
        with block:
            training.optimizer.step()
            if dist.get_rank() == 1:
                store.wait([key])
            else:
                done = stepping.Decision.done

                def soon(self: Any, while_waiting: Any) -> Any:
                    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
                    return done(self, while_waiting)

                stepping.Decision.done = soon  # type: ignore[method-assign]
    except KeyboardInterrupt:
        store.set(key, "")
    except StepUndone as error:
        heard.append(len(str(error)))
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
        if dist.get_rank() == 0:
            stepping.Decision.done = done  # type: ignore[method-assign]
    if not block.happened:
        assert_same_tensors(training.state(), before, "undone")
    return block.happened, len(heard)


def test_a_rank_that_waits_may_be_interrupted(pool_of):
    (first, _), (second, heard) = pool_of(2).run(interrupt_while_waiting, "raises")
    assert (first, second) == (False, False) and heard == 1


def test_a_handler_that_notes_a_signal_undoes_nothing(pool_of):
    assert pool_of(2).run(interrupt_while_waiting, "notes") == [(True, 1), (True, 0)]


def interrupt_while_undoing() -> list[tuple[Any, Any]]:
    training = Training()
    training.whole_step(0)
    before = training.state()
    bring_back = Remembered.bring_back

    def interrupted(self: Remembered) -> None:
        signal.raise_signal(signal.SIGINT)
        bring_back(self)

    Remembered.bring_back = interrupted  # type: ignore[method-assign]
    try:
        with lowtide.step(training.model, training.optimizer):
            training.whole_step(1)
            raise Boom("late")
    except KeyboardInterrupt:
        pass
    finally:
        Remembered.bring_back = bring_back  # type: ignore[method-assign]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return [(training.state(), before)]


def test_an_interrupt_waits_for_what_is_undone(pool_of):
    check(pool_of(1).run(interrupt_while_undoing))


def step_in_groups_of_one() -> bool:
    """Ranks that decide alone: of the last one's the step does not happen."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()
    before = shards(model, optimizer)
    block = lowtide.step(model, optimizer, process_group=alone[dist.get_rank()])
    with contextlib.suppress(Boom), block:
        optimizer.step()
        if is_last():
            raise Boom("alone")
    changed = not torch.equal(model.weight, before["weight"])
    assert changed == block.happened
    return changed


def test_ranks_of_another_group_do_not_take_part(pool_of):
    assert pool_of(2).run(step_in_groups_of_one) == [True, False]


# -- memory ---------------------------------------------------------------------------


def refuse_memory(where: str, ranks: str) -> Any:
    unbroken = Training().all_steps()
    training = Training()
    said = []
    for number in range(STEPS):
        tries = []

        def one_step(number: int = number, tries: list[int] = tries) -> None:
            tries.append(number)
            first = len(tries) == 1 and number == FAILING
            if first and (ranks == "all" or is_last()):
                if where == "gather":
                    memory.device_memory(torch.device("cpu")).fail_next_lease(
                        "gathered", "last"
                    )
                else:
                    training.breaks = BreaksAt(3, no_memory)
            training.whole_step(number)

        lowtide.step(training.model, training.optimizer).run(one_step)
        said.append(len(tries))
    assert said == [1, 2, 1, 1], said
    return [(training.state(), unbroken)]


def no_memory() -> None:
    raise torch.OutOfMemoryError("no 3 bytes")


@pytest.mark.parametrize(
    ("where", "ranks"), [("gather", "all"), ("optimizer", "all"), ("optimizer", "one")]
)
def test_a_step_without_memory_is_tried_once_more(pool_of, where, ranks):
    check(pool_of(2).run(refuse_memory, where, ranks))


def offload_more() -> Any:
    """The last blocks' inputs are offloaded, too, from the step that found no memory
    on."""

    def train(refused: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
        policy = lowtide.ActivationPolicy(offload=["input"], keep_last=2)
        for layer in layers:
            lowtide.fully_shard(lowtide.checkpoint(layer, policy))
        model: Any = nn.Sequential(nn.Linear(6, 6), *layers)
        lowtide.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        failing = False

        def one_step() -> None:
            model(torch.ones(4, 6)).square().sum().backward()
            nonlocal failing
            if failing:
                failing = False
                no_memory()
            optimizer.step()
            optimizer.zero_grad()

        moved: list[list[int]] = []
        for number in range(3):
            failing = refused and number == 1
            lowtide.step(model, optimizer).run(one_step)
            # Counted from the beginning, and from the refusal on.
            figures = [each.region.figures()["input"] for _, each in regions(model)]
            moved.append([each["moved"] for each in figures])
        assert moved == (MOVED_AFTER_REFUSAL if refused else MOVED), moved
        return shards(model, optimizer)

    with pytest.warns(UserWarning, match="keep_last") as warned:
        found = train(refused=True)
    assert str(warned[0].message).startswith(
        "lowtide: step: expected memory for the step with what keep_last of "
        "ActivationPolicy keeps on the device, got none: 3 checkpointed modules"
    )
    return [(found, train(refused=False))]


# Of three modules, the last two kept, by step.
MOVED = [[1, 0, 0], [2, 0, 0], [3, 0, 0]]
MOVED_AFTER_REFUSAL = [[1, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_what_policies_keep_on_the_device_is_offloaded_after_a_refusal(pool_of):
    check(pool_of(2).run(offload_more))


def refuse_memory_again(alone: bool) -> str:
    training = Training()
    training.whole_step(0)
    before = training.state()
    stepping._UNTIL_AGAIN = stepping.datetime.timedelta(seconds=1)

    def one_step() -> None:
        if alone and not is_last():
            store = dist.distributed_c10d._get_default_store()
            store.wait(["it is over"])  # as in a collective
            raise Boom("no answer")
        training.optimizer.step()
        no_memory()

    try:
        lowtide.step(training.model, training.optimizer).run(one_step)
    except (torch.OutOfMemoryError, StepUndone, Boom) as error:
        assert_same_tensors(training.state(), before, "undone")
        if alone and is_last():
            dist.distributed_c10d._get_default_store().set("it is over", "")
        return f"{type(error).__name__} {error}"
    return ""


def test_memory_refused_twice_is_said_with_who_held_it(pool_of):
    for text in pool_of(2).run(refuse_memory_again, False):
        kind, _, said = text.partition(" ")
        assert kind == "OutOfMemoryError"
        assert said.startswith(
            "lowtide: step: expected memory for the step, got 'OutOfMemoryError: no 3 "
            "bytes'. It was dropped; when it was refused there were "
        )
        assert re.search(r" \d+ B optimizer states", said)
        assert re.search(r" \d+ B shards in the storage dtype", said)
        assert said.endswith("`lowtide plan` says what would lower the peak most.")


def test_a_rank_alone_without_memory_does_not_wait_for_long(pool_of):
    other, alone = pool_of(2).run(refuse_memory_again, True)
    assert other == "Boom no answer"
    assert alone.startswith(
        "StepUndone lowtide: step: expected all 2 ranks to finish the step, got on "
        "rank 1: 'TimeoutError: 1 of 2 ranks after 1 s'"
    ), alone
