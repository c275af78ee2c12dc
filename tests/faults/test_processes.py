"""Faults of one rank that others wait for: with ``lowtide.step`` the survivors have
what they had before it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import stat
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from faults.training import Training
from lowtide.stepping import StepUndone
from support.bits import assert_same_tensors
from support.bombs import Boom
from support.ranks import RankPool


def cut_network() -> None:
    """Closes every connection of this process, as a switch that fails does."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family == socket.AF_INET:
                        one.shutdown(socket.SHUT_RDWR)


def leave(how: str) -> None:
    if how == "raises":
        raise Boom("alone")
    if how == "network":
        cut_network()
    else:
        os.kill(os.getpid(), getattr(signal, how))


def lose_a_rank(system: str, how: str, place: str, in_block: bool) -> str:
    """What this rank raises."""
    training = Training(system, "own collectives")
    training.step(0)
    before = training.state()
    if dist.get_rank() == 1:
        training.at[place] = lambda: leave(how)
    block: Any = contextlib.nullcontext()
    if in_block:
        block = lowtide.step(training.model, training.optimizer)
    try:
        with block:
            training.step(1)
    except (RuntimeError, Boom) as error:
        if in_block:
            assert_same_tensors(training.state(), before, "undone")
        return f"{type(error).__name__} {error}"
    return "no error"


pytestmark = pytest.mark.slow

FAULTS = ("raises", "network", "SIGKILL", "SIGSTOP")


@pytest.mark.parametrize(
    ("system", "in_block"), [("lowtide", True), ("lowtide", False), ("fsdp2", False)]
)
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("how", FAULTS)
def test_survivors_raise(how, place, system, in_block):
    with RankPool(2, group_timeout=3.0) as pool:
        survivor, lost = pool.outcomes(
            lose_a_rank, system, how, place, in_block, timeout=7
        )
    assert survivor.kind == "value", survivor
    kind, _, text = survivor.value.partition(" ")
    if system == "lowtide":
        assert kind == "RuntimeError"
        assert text.startswith("lowtide: ") and "(rank 0 of 2)" in text, text
    else:
        assert kind in ("RuntimeError", "DistBackendError"), kind
    # gloo ends the process whose own connections fail.
    kinds = {"raises": "value", "SIGSTOP": "timeout"}
    assert lost.kind == kinds.get(how, "died")
    assert how != "raises" or lost.value == "Boom alone"


def interrupted_at_random(seed: int) -> dict[str, Any]:
    """Every block is interrupted, at some moment, until one is through."""
    training = Training("lowtide")
    randomly = random.Random(100 * seed + dist.get_rank())
    armed = False
    tries = 0

    def handler(number: int, frame: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handler)
    try:
        for number in range(3):
            ((x, y),) = training.batches(number)
            out = training.model(x)
            torch.nn.functional.cross_entropy(out, y).backward()
            block = lowtide.step(training.model, training.optimizer)
            while True:
                tries += 1
                delay = randomly.expovariate(1 / (0.004 * tries))
                timer = threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT])
                try:
                    timer.start()
                    armed = True
                    with block:
                        training.optimizer.step()
                except (KeyboardInterrupt, StepUndone):
                    pass
                armed = False
                timer.join()
                if block.happened:
                    break
            training.optimizer.zero_grad()
    finally:
        signal.signal(signal.SIGINT, previous)
    return training.state()


def uninterrupted() -> dict[str, Any]:
    training = Training("lowtide")
    for number in range(3):
        ((x, y),) = training.batches(number)
        out = training.model(x)
        torch.nn.functional.cross_entropy(out, y).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.state()


@pytest.mark.parametrize("seed", range(6))
def test_steps_interrupted_at_random_moments_end_alike(ranks, seed):
    expected = ranks.run(uninterrupted)
    found = ranks.run(interrupted_at_random, seed, timeout=60)
    for rank in range(2):
        assert_same_tensors(found[rank], expected[rank], f"rank {rank}")


# -- an interrupt at any line ---------------------------------------------------------


DECIDING = tuple(
    f"/lowtide/stepping/{name}.py" for name in ("__init__", "decision", "signals")
)


class InterruptsAt:
    """SIGINT at line number ``at`` of lowtide's that runs; counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.endswith(DECIDING):
            return self if event == "call" and "/torch/" not in file else None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted_lines(every: int) -> list[int]:
    """How many lines a step has, and how often an interrupt undid it."""
    training = Training("lowtide")
    training.step(0)
    generator = torch.get_rng_state()
    lines = InterruptsAt(0)

    def optimizer_step(block: Any) -> None:
        with block:
            training.optimizer.step()

    def step_until_it_happens(lines: InterruptsAt) -> bool:
        """Whether it did at once."""
        torch.set_rng_state(generator)
        ((x, y),) = training.batches(1)
        torch.nn.functional.cross_entropy(training.model(x), y).backward()
        before = training.state()
        at_once = True
        while True:
            block = lowtide.step(training.model, training.optimizer)
            sys.settrace(lines if dist.get_rank() == 1 else None)
            try:
                optimizer_step(block)
            except (KeyboardInterrupt, StepUndone):
                pass
            finally:
                sys.settrace(None)
            if block.happened:
                return at_once
            at_once = False
            assert_same_tensors(training.state(), before, "undone")

    assert step_until_it_happens(lines)
    dist.broadcast(count := torch.tensor(lines.count), 1)
    undone = 0
    for at in range(1, int(count), every):
        undone += not step_until_it_happens(InterruptsAt(at))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return [int(count), undone, training.state()]


def test_an_interrupt_at_any_line_is_all_or_nothing(ranks):
    (lines, undone, state), (_, _, other) = ranks.run(interrupted_lines, 5)
    tried = len(range(1, lines, 5))
    assert 0 < undone < tried  # the last ones come when it has happened
    for name, value in state.items():
        if name.endswith(".step"):
            assert value == other[name] == tried + 2, name
