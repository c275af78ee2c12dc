"""torch's own CUDA over the driver that computes nothing (`lowtide.phantom.dry`)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lowtide.phantom import machines
from lowtide.phantom.clock import StepTime, timeline
from lowtide.phantom.dry import (
    calls,
    driver,
    launch,
    lone_rank,
    settling,
    sizes,
    timekeeper,
    values,
)
from lowtide.phantom.dry.untraced import untraced
from lowtide.phantom.nccl_buffers import Communicator, communicators
from lowtide.planning import snapshot, step_times
from lowtide.planning.decisions import lines_that_decide
from lowtide.planning.history import Entry, History, Replayed, Settings, of_journal
from lowtide.planning.recording import Listener
from lowtide.planning.replays import Replays
from lowtide.planning.request import Request
from lowtide.planning.stacks import short

if TYPE_CHECKING:
    from lowtide.planning.analysis import Analysis
    from lowtide.planning.recording import Recorder

# More than any plan takes: what does not fit is found out afterwards.
_LIMIT = 1 << 40
_MOST_ENTRIES = 10**7


def machine(request: Request) -> launch.Machine:
    return launch.Machine(
        gpu=request.gpu,
        memory=request.device_memory,
        limit=_LIMIT,
        events=request.events,
        world=request.world if request.torchrun else None,
        rank=request.rank if request.torchrun else 0,
    )


class DryDevice:
    """An :class:`~lowtide.planning.recording.Instrument`; for the rest of a process
    that was started with the environment of :func:`machine`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.notes: list[str] = []
        library = launch.DRIVER.with_name("liblowtide_dry_observer.so")
        observer = ctypes.CDLL(str(library))
        self._replays = Replays(observer)
        self.device = torch.device("cuda", request.rank % machine(request).num_devices)
        values.install()
        sizes.install(request.nonzero)
        settling.install()
        lone_rank.install(request.world, request.rank, request.port)
        self._journal = _Journal(observer, self.device.index)
        # A program that does not choose its device is taken to mean this rank's.
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(self.device))
        if request.snapshot is not None:
            torch.cuda._lazy_call(_record_history)
        # Where links are slow, gathers leave by the time that they take.
        timed = request.time or machines.has_slow_links(request.gpu)
        self._clock = timeline() if timed else None

    # -- while the program runs -------------------------------------------------------

    def listen(self, listener: Listener | None) -> None:
        self._journal.listen(listener)

    def tell(self) -> None:
        self._journal.tell()

    def num_frees(self) -> int:
        return self._journal.num_frees()

    def clear_workspaces(self) -> None:
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()

    def moment(self) -> int:
        return timekeeper.moment() if self._clock is not None else 0

    def run(self, program: Callable[[], None]) -> None:
        with self._clock or contextlib.nullcontext():
            program()

    def assumptions(self) -> list[str]:
        return [
            *_assumptions(),
            *(f"the driver lacks {name}" for name in driver.missing()),
        ]

    # -- afterwards -------------------------------------------------------------------

    def history(self, recorder: Recorder) -> History:
        def replay(settings: Settings, capacity: int | None) -> Replayed:
            if settings.expandable and max(found.blocks, default=0) > self.memory():
                # torch sizes segments that grow by the device, and crashes there.
                return Replayed(False, 0, 0)
            return self._replays.ask(found.operations, settings, capacity or _LIMIT)

        found = of_journal(self._journal.entries(), self._settings(), replay)
        return found

    def _settings(self) -> Settings:
        """The allocator's settings as they were in the end."""
        reported = torch.cuda.memory._snapshot()["allocator_settings"]
        return Settings(
            conf=reported["PYTORCH_CUDA_ALLOC_CONF"],
            expandable=bool(reported["expandable_segments"]),
            events=self._request.events,
        )

    def write_snapshot(self, analysis: Analysis, path: str) -> None:
        content = torch.cuda.memory._snapshot()
        entries = content["device_traces"][self.device.index]
        snapshot.write(analysis, content, entries, path)

    def step_time(self, analysis: Analysis) -> StepTime | None:
        if self._clock is None or not self._request.time:
            return None
        return step_times.of_last_step(analysis, self._clock, self._request.trace)

    def memory(self) -> int:
        """Bytes of the GPU that the program sees."""
        total: int = torch.cuda.get_device_properties(self.device).total_memory
        return total

    def communicators(self) -> list[Communicator]:
        network = machines.network_of(self._request.gpu)
        return communicators(calls.collect(), network)

    def pinned(self) -> int | None:
        return driver.peak_pinned()


_MOST_SHOWN = 5


def _assumptions() -> list[str]:
    """What was assumed, with its lines; numbers where they decide something."""
    decide: dict[str, None] = {}
    others: dict[str, dict[str, None]] = {}
    for what, where in values.notes:
        if what in (values.TRUTH, values.COUNT):
            decide[_shown(where)] = None
        elif what == values.NUMBER:
            file, _, line = where.rpartition(":")
            for number in lines_that_decide(file, int(line)) if line.isdigit() else ():
                decide[_shown(f"{file}:{number}")] = None
        else:
            others.setdefault(what, {})[_shown(where)] = None
    found = [f"{what} ({_list(lines)})" for what, lines in sorted(others.items())]
    if decide:
        found.append(
            f"values that nobody computed decide at {_list(decide)}: they read as "
            "False, numbers as 1, and the figures are those of that way"
        )
    return found


def _shown(where: str) -> str:
    file, colon, line = where.rpartition(":")
    return f"{short(file)}:{line}" if colon else where


def _list(lines: Iterable[str]) -> str:
    every = list(lines)
    more = len(every) - _MOST_SHOWN
    shown = ", ".join(every[:_MOST_SHOWN])
    return f"{shown} and {more} more lines" if more > 0 else shown


def _record_history() -> None:
    gc.collect()
    torch.cuda.memory._record_memory_history(context=None, max_entries=_MOST_ENTRIES)


class _Journal:
    """csrc/phantom/observer/allocation_journal.h, from CUDA's first use on."""

    def __init__(self, observer: ctypes.CDLL, device: int) -> None:
        self._observer = observer
        for name in ("read_journal", "num_frees"):
            getattr(self._observer, f"lowtide_dry_{name}").restype = ctypes.c_int64
        self._device = device
        self._started = False
        self._listener: Any = None  # alive as long as the observer has it
        torch.cuda._lazy_call(self._start)
        _tell_behind_resizes(self._observer.lowtide_dry_tell_of_allocations)

    def _start(self) -> None:
        self._observer.lowtide_dry_start_journal(self._device)
        self._started = True

    def listen(self, listener: Listener | None) -> None:
        @untraced
        def hear(address: int, operator: bytes) -> None:
            if listener is not None:
                listener(address, 0, 0, operator.decode())

        hears = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p)
        before, self._listener = self._listener, hears(hear)
        self._observer.lowtide_dry_hear_allocations(self._listener)
        del before

    def tell(self) -> None:
        self._observer.lowtide_dry_tell_of_allocations()

    def num_frees(self) -> int:
        return int(self._observer.lowtide_dry_num_frees()) if self._started else 0

    def entries(self) -> list[Entry]:
        if not self._started:
            return []
        first = ctypes.POINTER(ctypes.c_int64)()
        count = self._observer.lowtide_dry_read_journal(ctypes.byref(first))
        numbers = first[: 6 * count]
        columns = (numbers[place::6] for place in range(6))
        return list(zip(*columns, strict=True))


def _tell_behind_resizes(tell: Callable[[], None]) -> None:
    """FSDP2 takes memory for gathered parameters so, which is no operator."""
    resize = torch.UntypedStorage.resize_

    @untraced
    def resize_and_tell(self: torch.UntypedStorage, size: int) -> Any:
        result = resize(self, size)
        tell()
        return result

    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore
