"""``lowtide.step``: a training step that happens on all ranks, or on none."""

import datetime
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lowtide._sharding.unit import units_of
from lowtide.stepping import out_of_memory
from lowtide.stepping.decision import Answer, Decision, is_out_of_memory
from lowtide.stepping.remembered import Remembered, abort_keeping_gradients
from lowtide.stepping.signals import Signals

__all__ = ["Step", "StepUndone", "step"]

_Value = TypeVar("_Value")

# Blocks of this process that have begun and not ended, the innermost last.
_open: list["Step"] = []

# How long a rank that found no memory waits for the others to be through with the step.
_UNTIL_AGAIN = datetime.timedelta(seconds=60)


class StepUndone(RuntimeError):
    """A step that did not happen because another rank raised. Model and optimizer are
    as they were before it."""


def step(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> "Step":
    """``with lowtide.step(model, optimizer): ...`` is all or nothing: where the block
    raises on any rank, interrupts included, or a rank does not come to its end,
    parameters, optimizer states and counters, parameter groups, buffers, ``.grad`` and
    torch's random numbers are on every rank bit for bit what they were when it began,
    and states that did not exist are gone. The block may be the whole step, or
    ``optimizer.step()`` alone: gradients that were there before it are there again.

    Ranks agree through the default group's store, at the end of the block; no device
    waits. Everything the optimizers may write (and buffers, and gradients that are
    there) is copied to host memory when the block begins: on a device by a stream of
    its own, which the optimizer's step waits for.

    Schedulers, ``GradScaler``, data loaders and what else counts steps stay the
    program's: call ``scheduler.step()`` and ``scaler.update()`` behind the block.

    Args:
        model: Sharded by lowtide or not; parameters that no optimizer has are not
            remembered, but for their gradients.
        process_group: The ranks that step together, by default all.

    Raises:
        StepUndone: Where another rank raised, naming it; what this rank raised is
            passed on, out of memory with what held how much.
        RuntimeError: In a block that begins between two microbatches, whose gradients
            wait for a reduction and could not come back.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    return Step(model, optimizers, process_group)


class Step:
    """A block, to be entered as often as there are steps, one after another."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._group = process_group
        self._decision: Decision | None = None
        self._answer = Answer(False)

    def __enter__(self) -> None:
        self._answer = Answer(False)
        self._decision = None
        self._signals = Signals(_ENDS)
        _require_nothing_waits(self._model)
        try:
            self._signals.take()
            self._decision = Decision(self._group)
            self._remembered = Remembered(self._model, self._optimizers)
            self._signals.deliver()
            _open.append(self)
        except BaseException as error:
            self._signals.give_back()
            if self._decision is not None:
                self._decision.failed(error)
                abort_keeping_gradients(self._model)  # as the others do
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _open.remove(self)
        try:
            raised = self._end(error)
        finally:
            self._signals.give_back()
        self._signals.deliver()
        if raised is not None:
            raise raised from error

    @property
    def optimizers(self) -> list[Optimizer]:
        """Whose states and parameters are remembered."""
        return self._optimizers

    @property
    def happened(self) -> bool:
        """Whether the block that ended last did, on every rank: also where an
        interrupt that came at its very end is raised behind it. To be asked of a new
        :func:`step` each time, since one may be interrupted before it begins."""
        return self._answer.happened

    def run(self, function: Callable[[], _Value]) -> _Value:
        """What ``function`` returns, called in the block; where a rank finds no memory
        the step is dropped, memory that nobody uses is given back to the device, what
        activation policies keep there by ``keep_last`` is offloaded from then on, and
        ``function`` is called once more, on all ranks. It is not where a rank does not
        come out of the step: others may wait for one that raised alone."""
        try:
            with self:
                return function()
        except BaseException as error:
            if not self._answer.out_of_memory:
                raise
            _let_go_of_frames(error)
            self._require_all_again(error)
        out_of_memory.give_back(self._device)
        out_of_memory.offload_more(self._model)
        with self:
            return function()

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Decides, undoes; returns what is to be raised, if it is not ``error``."""
        assert self._decision is not None
        self._answer, raised = _decide(self._decision, self._signals, error)
        remembered, self._device = self._remembered, self._remembered.device
        del self._remembered
        if self._answer.happened:
            return raised
        try:
            if error is None:
                return raised or _undone(self._answer, self._decision)
            if is_out_of_memory(error):
                text = out_of_memory.blame(self._device, self._optimizers, error)
                return torch.OutOfMemoryError(text)
            return None
        finally:
            remembered.bring_back()

    def _require_all_again(self, error: BaseException) -> None:
        """Ranks that are in a collective of the step do not come: they have to end."""
        again = Decision(self._group)
        if not isinstance(error, StepUndone) and not is_out_of_memory(error):
            again.failed(error)
            raise error
        try:
            answer = again.done(lambda: None, _UNTIL_AGAIN)
        except BaseException as interrupt:
            again.failed(interrupt)
            raise
        if not answer.happened:
            raise _undone(answer, again) from error


# Where a handler that raises would leave the block half begun or half ended.
_ENDS = (Step.__enter__.__code__, Step.__exit__.__code__)


def _decide(
    decision: Decision, signals: Signals, error: BaseException | None
) -> tuple[Answer, BaseException | None]:
    """And what a signal's handler raised meanwhile."""
    if error is not None:
        return decision.failed(error), None
    try:
        return decision.done(signals.deliver), None
    except BaseException as raised:
        return decision.failed(raised), raised


def _undone(answer: Answer, decision: Decision) -> StepUndone:
    return StepUndone(
        f"lowtide: step: expected all {decision.size} ranks to finish the step, got on "
        f"rank {answer.rank}: {answer.text!r} (rank {decision.rank}). It did not "
        "happen on any rank; remove the cause and go on with this step or the next."
    )


def innermost() -> Step | None:
    """The block that this process is in."""
    return _open[-1] if _open else None


def unit_that_waits(model: nn.Module) -> str | None:
    """The name of a unit whose gradients wait for a reduction: no step begins there."""
    for state in units_of(model.modules()):
        if state.unit is not None and state.unit.accumulating:
            return state.name
    return None


def _require_nothing_waits(model: nn.Module) -> None:
    if (name := unit_that_waits(model)) is not None:
        raise RuntimeError(
            f"lowtide: step: expected unit '{name}' without gradients that wait for a "
            "reduction, got some of earlier microbatches, which could not come back. "
            "Begin the step before the first microbatch."
        )


def _let_go_of_frames(error: BaseException) -> None:
    """Whose variables are activations of the step."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
