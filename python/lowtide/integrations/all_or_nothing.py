"""``lowtide.step`` in a loop that somebody else wrote.

[Note: Where a foreign step can be undone]
Every ``optimizer.step`` of a sharded model gets a block: its gradients are there before
it, so it can be undone, and be called again where memory was refused. What forward and
backward leave when they raise is undone without a block. Where a framework has one
function for both of a microbatch, that gets a block, too, which remembers buffers and
gradients alone, so that a microbatch without memory runs again. Lightning hands both to
the optimizer as a closure: there one block is the whole step.

A block can not begin where gradients of earlier microbatches wait for a reduction: such
a closure is called before the block, such a microbatch without one.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide import api, stepping
from lowtide._base.optimizers import step_around
from lowtide._sharding.local_parameter import sharded_of
from lowtide._sharding.optimizers import modules_around

__all__ = ["guard"]

# Module, class and method of one microbatch's forward and backward.
_MICROBATCHES = (
    ("transformers.trainer", "Trainer", "training_step"),
    ("torchtitan.train", "Trainer", "forward_backward_step"),
    ("torchtitan.trainer", "Trainer", "forward_backward_step"),  # from 0.3 on
)
_MARK = "_lowtide_all_or_nothing"
_guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@dataclass
class Counts:
    """Of this process."""

    steps: int = 0  # optimizer steps that happened
    undone: int = 0  # blocks that did not happen, those of microbatches included
    again: int = 0  # functions that were called once more

    def text(self) -> str:
        return (
            f"{self.steps} optimizer steps happened; {self.undone} were undone; "
            f"{self.again} ran again for want of memory"
        )


counts = Counts()


def guard(optimizer: Optimizer) -> None:
    """From now on a ``step`` of this optimizer happens on all ranks or on none, as in a
    block of :func:`lowtide.step`: where it raises on a rank, interrupts included, that
    rank raises it, the others raise ``StepUndone``, and on every rank parameters,
    states, counters, gradients and random numbers are what they were before. Where
    memory was refused it is called once more, on all ranks. Forward and backward of
    transformers' and torchtitan's trainers are called once more, too.

    All ranks of the default group step together. An optimizer of models that lowtide
    has not sharded is left alone.
    """
    if optimizer in _guarded:
        return
    _guarded.add(optimizer)
    step_around(optimizer, _step)
    _guard_microbatches()


def guard_all() -> Callable[[], None]:
    """:func:`guard` for every optimizer that is made until the result is called."""
    theirs = Optimizer.__init__

    @functools.wraps(theirs)
    def init(self: Optimizer, *args: Any, **settings: Any) -> None:
        theirs(self, *args, **settings)
        guard(self)

    Optimizer.__init__ = init  # type: ignore[method-assign]

    def undo() -> None:
        Optimizer.__init__ = theirs  # type: ignore[method-assign]

    return undo


@torch.compiler.disable
def _step(
    optimizer: Optimizer, call: Callable[..., Any], args: tuple[Any, ...], kw: Any
) -> Any:
    modules = modules_around(optimizer)
    around = stepping.innermost()
    if around is not None and modules and not around.optimizers:
        raise NotImplementedError(
            f"lowtide: all or nothing: expected {type(optimizer).__name__} to step "
            "behind the backward, got a step within it, which could not be undone. "
            "Turn the optimizer in the backward off, or leave all-or-nothing steps out."
        )
    if around is not None or not modules:
        return call(optimizer, *args, **kw)
    model = nn.ModuleList(modules)
    closure = args[0] if args else kw.get("closure")
    if closure is not None and stepping.unit_that_waits(model) is not None:
        with torch.enable_grad():
            value = closure()

        def function() -> Any:
            return call(optimizer, closure=_known_once(value, closure))
    else:

        def function() -> Any:
            return call(optimizer, *args, **kw)

    return _run(stepping.Step(model, [optimizer], None), function)


def _known_once(value: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure whose first value is known, its gradients there, already."""
    known = [value]
    return lambda: known.pop() if known else closure()


def _run(block: stepping.Step, function: Callable[[], Any]) -> Any:
    calls = 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return function()

    try:
        return block.run(counted)
    finally:
        counts.again += max(calls - 1, 0)
        counts.undone += calls - block.happened
        counts.steps += block.happened and bool(block.optimizers)


# -- forward and backward of a microbatch --------------------------------------------


def _guard_microbatches() -> None:
    """Of the frameworks that are loaded."""
    for name, trainer, method in _MICROBATCHES:
        for module in _loaded(name):
            cls = getattr(module, trainer, None)
            if cls is not None and not hasattr(vars(cls)[method], _MARK):
                setattr(cls, method, _guarded_microbatch(vars(cls)[method]))


def _loaded(name: str) -> Iterator[types.ModuleType]:
    """A program that was started as ``-m name`` is another module of the same code."""
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) == name:
        yield main
    if name in sys.modules:
        yield sys.modules[name]


def _guarded_microbatch(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def microbatch(trainer: Any, *args: Any, **kw: Any) -> Any:
        parts = getattr(trainer, "model_parts", None) or [trainer.model]
        model = nn.ModuleList(parts)
        if (
            stepping.innermost() is not None
            or not _is_guarded(model)
            or stepping.unit_that_waits(model) is not None
        ):
            return theirs(trainer, *args, **kw)
        block = stepping.Step(model, [], None)
        return _run(block, lambda: theirs(trainer, *args, **kw))

    setattr(microbatch, _MARK, True)
    return microbatch


def _is_guarded(model: nn.Module) -> bool:
    """Sharded by lowtide, and stepped by an optimizer that is guarded."""
    if not any(isinstance(module, api.FSDPModule) for module in model.modules()):
        return False
    own = {id(p) for p in model.parameters()}
    return any(
        id(sharded_of(p)) in own
        for optimizer in _guarded
        for group in optimizer.param_groups
        for p in group["params"]
    )
