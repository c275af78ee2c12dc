"""The simulated device (`lowtide.phantom.install`), which can keep time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import lowtide.phantom
from lowtide import _phantom
from lowtide.phantom import alloc_conf
from lowtide.phantom.allocator import AllocatorModel
from lowtide.phantom.histories import trace_of_model
from lowtide.phantom.snapshots import torch_snapshot
from lowtide.phantom.traces import Trace, replay
from lowtide.planning import cuda, process_group, snapshot, step_times
from lowtide.planning.decisions import Decisions
from lowtide.planning.history import History, Replayed
from lowtide.planning.recording import Listener
from lowtide.planning.request import Request

if TYPE_CHECKING:
    from lowtide.phantom.clock import StepTime
    from lowtide.planning.analysis import Analysis
    from lowtide.planning.recording import Recorder

_MAX_EVENTS = 50_000_000


class SimulatedDevice:
    """An :class:`~lowtide.planning.recording.Instrument`; for the rest of the
    process."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.notes: list[str] = []
        if request.allow:
            self.notes.append(
                "of operators that were allowed only the outputs are counted, not what "
                f"they take while they run: {', '.join(request.allow)}"
            )
        if (fraction := request.allocator.get("memory_fraction", 1.0)) != 1.0:
            raise ValueError(
                "lowtide: plan: expected an allocator without "
                f"per_process_memory_fraction, got {fraction}. Pass that share of the "
                "GPU as --device-memory."
            )
        settings = {"allow": list(request.allow), **request.allocator}
        lowtide.phantom.install(mode="meta", **settings)
        self._allocator = AllocatorModel.of_device()
        self._allocator.record_history(_MAX_EVENTS)
        self._decisions = Decisions()
        cuda.set_up(
            num_devices=process_group.ranks_of_a_node(request.world),
            memory=request.device_memory,
            decisions=self._decisions,
            notes=self.notes,
        )
        process_group.set_up(
            world=request.world,
            rank=request.rank,
            torchrun=request.torchrun,
            notes=self.notes,
        )
        self._conf = alloc_conf.environment()
        self.device = torch.device("phantom", 0)
        self._clock = lowtide.phantom.timeline(request.time) if request.time else None

    # -- while the program runs -------------------------------------------------------

    def listen(self, listener: Listener | None) -> None:
        _phantom.set_allocation_listener(listener)

    def tell(self) -> None:
        pass  # it always hears at once

    def num_frees(self) -> int:
        statistics = _phantom.device_memory().statistics()
        freed: int = statistics["allocation"]["all"]["freed"]
        return freed

    def clear_workspaces(self) -> None:
        _phantom.clear_cublas_workspaces()

    def now(self) -> float:
        return _phantom.time_on_device()

    def run(self, program: Callable[[], None]) -> None:
        with self._clock or contextlib.nullcontext():
            program()
        conf = alloc_conf.environment()
        if conf != self._conf:
            raise ValueError(
                "lowtide: plan: expected PYTORCH_CUDA_ALLOC_CONF and "
                f"PYTORCH_ALLOC_CONF to stay what they were, {self._conf!r}, got "
                f"{conf!r}, which the program set. Set it before the command too."
            )

    def assumptions(self) -> list[str]:
        note = self._decisions.note()
        return [note] if note else []

    # -- afterwards -------------------------------------------------------------------

    def history(self, recorder: Recorder) -> History:
        trace = trace_of_model(self._allocator)
        history = History(trace, functools.partial(_replay, trace))
        history.addresses = [e[1] for e in self._allocator.history() if e[0] == "alloc"]
        model = AllocatorModel(**history.trace.settings)
        handles: dict[int | None, int] = {}
        for operation in history.trace.operations:
            if operation.op == "allocate":
                assert operation.bytes is not None
                handle = model.malloc(operation.bytes, operation.stream or 0)
                handles[operation.id] = handle
                history.blocks.append(model.size_of(handle))
            elif operation.op == "free":
                model.free(handles.pop(operation.id))
            elif operation.op == "record":
                model.record_stream(handles[operation.id], operation.stream or 0)
            elif operation.op == "synchronize":
                model.synchronize(operation.stream)
            else:
                model.empty_cache()
            history.allocated.append(model.allocated)
            history.reserved.append(model.reserved)
        return history

    def write_snapshot(self, analysis: Analysis, path: str) -> None:
        content = torch_snapshot(self._allocator)
        snapshot.write(analysis, content, content["device_traces"][0], path)

    def step_time(self, analysis: Analysis) -> StepTime | None:
        if self._clock is None:
            return None
        return step_times.of_last_step(
            analysis, self._clock, self._request.trace, self.notes
        )

    def memory(self) -> int | None:
        return self._request.device_memory

    def pinned(self) -> int | None:
        return None


def _replay(trace: Trace, *, capacity: int | None = None, **others: Any) -> Replayed:
    model = AllocatorModel(**{**trace.settings, **others, "capacity": capacity})
    fits = True
    try:
        replay(trace, model)
    except torch.OutOfMemoryError:
        fits = False
    stats = model.stats()
    peak = stats.get("reserved_bytes.all.peak", 0)
    return Replayed(fits, peak, stats["num_alloc_retries"])
