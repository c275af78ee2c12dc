"""Saves that the step does not wait for: a snapshot in host memory, then a thread.

[Note: When the snapshot is taken]
On a device the copies run on a stream of their own, into page-locked memory. Only an
optimizer's step writes parameters and its own state, so the first one behind the save
waits for the copies, on the device. Whatever else a step may write, buffers and
gradients, is copied in the compute stream's order. In host memory copies are made at
once.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._sharding.local_parameter import rows_of
from lowtide._sharding.subclass import made_of
from lowtide.saving import content

_streams: dict[torch.device, Any] = {}
_awaited: list[tuple[Any, torch.device]] = []  # by the next optimizer step
_pending: "Saving | None" = None


class Saving:
    """A save in the background. The next save or load waits for it and raises what it
    raised; so does :meth:`wait`."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="lowtide-save"
        )

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the checkpoint is published. Raises CheckpointError, on every rank,
        if it was not."""
        global _pending
        self._thread.join()
        if _pending is self:
            _pending = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # raised by wait()
            self._error = error


def start(write: Callable[[], None]) -> Saving:
    global _pending
    assert _pending is None
    saving = _pending = Saving(write)
    saving._thread.start()
    return saving


def wait_for_pending() -> None:
    if _pending is not None:
        _pending.wait()


def bytes_of(state: Mapping[str, Any]) -> int:
    return sum(rows_of(t).nbytes for t in _tensors(state))


class Snapshot:
    """A copy of a state dict in host memory."""

    def __init__(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._events: list[Any] = []
        self._keeps: list[Tensor] = []  # until the copies have run
        stepped = {content.MODEL, content.OPTIMIZER}
        self.state: dict[str, Any] = {}
        with torch.no_grad():
            if device.type == "cpu":
                self.state = _mapped(state, lambda t: _host(t, pinned=False))
                return
            device_module = torch.get_device_module(device)
            stream = _streams.setdefault(device, device_module.Stream(device))
            current = device_module.current_stream(device)
            stream.wait_stream(current)
            for key, value in state.items():
                beside = key in stepped
                with device_module.stream(stream if beside else current):
                    self.state[key] = _mapped(
                        value, lambda t: _host(t, pinned=t.device.type != "cpu")
                    )
            self._keeps = [rows_of(t) for t in _tensors(state)]
            self._events = [stream.record_event(), current.record_event()]
            _let_steps_wait(self._events[0], device)

    def wait(self) -> None:
        """The host does, in the thread that writes."""
        for event in self._events:
            event.synchronize()
        self._keeps = []


def _host(tensor: Tensor, pinned: bool) -> Tensor:
    def copied(from_: Tensor) -> Tensor:
        into = torch.empty_like(from_, device="cpu", pin_memory=pinned)
        return into.copy_(from_, non_blocking=pinned)

    copy = made_of(rows_of(tensor).detach(), copied)
    if isinstance(tensor, DTensor):
        return DTensor(copy, tensor._spec, requires_grad=False)
    return copy


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(each, function) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, function) for each in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _let_steps_wait(event: Any, device: torch.device) -> None:
    """The next step of any optimizer."""
    _register_once()
    _awaited.append((event, device))


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(*args: Any) -> None:
    let_snapshots_finish()


def let_snapshots_finish() -> None:
    """Before anything is written that one may still copy, on the current stream."""
    while _awaited:
        event, device = _awaited.pop()
        torch.get_device_module(device).current_stream(device).wait_event(event)
