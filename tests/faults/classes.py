"""The faults of one step, each on every rank that it is armed on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from faults.training import Training
from support.bombs import Boom

_PLACES = (
    *("data loader", "forward pre-hook", "forward", "inner", "forward hook"),
    *("all-gather", "loss", "backward", "gradient hook", "recomputation"),
    *("reduce-scatter", "optimizer's hook", "behind the optimizer"),
)


@dataclass(frozen=True)
class Fault:
    arm: Callable[[Training], Any]
    raises: tuple[type[BaseException], ...] = (Boom,)
    # Whether other ranks wait for this one, in a collective.
    in_collectives: bool = True
    systems: tuple[str, ...] = ("lowtide", "fsdp2")
    variant: str = ""  # of the training


def boom() -> None:
    raise Boom("here")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def terminate() -> None:
    """As a scheduler ends a job, of a program that leaves by ``SystemExit``."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the handler runs in between
            pass
    finally:
        signal.signal(signal.SIGTERM, previous)


def no_memory() -> None:
    raise torch.OutOfMemoryError("no 5 bytes")


def at(place: str, how: Callable[[], None]) -> Callable[[Training], None]:
    return lambda training: training.at.update({place: how})


def wider_batch(training: Training) -> None:
    training.change_batch = lambda x, y: (torch.cat([x, x], 1), y)


def fewer_labels(training: Training) -> None:
    training.change_batch = lambda x, y: (x, y[:-1])


def unknown_label(training: Training) -> None:
    training.change_batch = lambda x, y: (x, y + 3)


def not_finite(value: float) -> Callable[[Training], None]:
    def arm(training: Training) -> None:
        training.change_batch = lambda x, y: (x * value, y)
        training.clip_as_error = True

    return arm


def lease_of(category: str, name: str) -> Callable[[Training], None]:
    def arm(training: Training) -> None:
        from lowtide._base import memory

        memory.device_memory(torch.device("cpu")).fail_next_lease(category, name)

    return arm


def in_optimizer(how: Callable[[], None], number: int) -> Callable[[Training], None]:
    return lambda training: training.break_optimizer(how, number)


OUTSIDE = ("optimizer's hook", "behind the optimizer")
ours = ("lowtide",)
memory_errors = (torch.OutOfMemoryError,)

FAULTS: dict[str, Fault] = {
    **{
        f"exception: {place}": Fault(
            at(place, boom),
            # An exception that a communication hook raised is passed on as it is, or
            # with lowtide's sentence.
            (Boom, RuntimeError)
            if place in ("all-gather", "reduce-scatter")
            else (Boom,),
            in_collectives=place not in OUTSIDE,
        )
        for place in _PLACES
    },
    **{
        f"interrupt: {place}": Fault(
            at(place, interrupt),
            (KeyboardInterrupt,),
            in_collectives=place not in OUTSIDE,
        )
        for place in ("data loader", "forward", "backward", "recomputation")
    },
    "termination: forward": Fault(at("forward", terminate), (SystemExit,)),
    "exception: optimizer, first operator": Fault(
        in_optimizer(boom, 0), in_collectives=False
    ),
    "exception: optimizer, midway": Fault(in_optimizer(boom, 31), in_collectives=False),
    "interrupt: optimizer, midway": Fault(
        in_optimizer(interrupt, 31), (KeyboardInterrupt,), in_collectives=False
    ),
    "memory: optimizer, midway": Fault(
        in_optimizer(no_memory, 31), memory_errors, in_collectives=False
    ),
    "memory: forward": Fault(at("forward", no_memory), memory_errors),
    "memory: gathered parameters": Fault(
        lease_of("gathered", "inner"), memory_errors, systems=ours
    ),
    "memory: gradients": Fault(
        lease_of("gradient_stream", "Net"), memory_errors, systems=ours
    ),
    "exception: compiled block": Fault(at("compiled block", boom), variant="compiled"),
    "exception: lowtide.checkpoint's recomputation": Fault(
        at("recomputation", boom), systems=ours, variant="offload"
    ),
    "memory: copy back from the host": Fault(
        lease_of("activations", "input"),
        memory_errors,
        systems=ours,
        variant="offload",
    ),
    "batch: wrong width": Fault(wider_batch, (RuntimeError,)),
    "batch: too few labels": Fault(fewer_labels, (ValueError,)),
    "batch: unknown label": Fault(unknown_label, (IndexError,)),
    "gradients: NaN": Fault(not_finite(float("nan")), (RuntimeError,)),
    "gradients: infinite": Fault(not_finite(float("inf")), (RuntimeError,)),
}


def run_failing(training: Training, number: int, fault: Fault, block: Any) -> Any:
    """What the armed step raised."""
    with contextlib.ExitStack() as stack:
        stack.callback(training.at.clear)
        fault.arm(training)
        try:
            with block:
                training.step(number)
        except BaseException as error:
            if not isinstance(error, fault.raises):
                raise
            return error
        finally:
            training.change_batch, training.clip_as_error = None, False
    raise AssertionError("the fault did not happen")
