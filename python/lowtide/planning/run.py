"""Starts the process that runs a program."""

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import tempfile
import threading
import time as clock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from lowtide.phantom.dry import ends, launch
from lowtide.planning import worker
from lowtide.planning.dry_device import machine
from lowtide.planning.report import Plan
from lowtide.planning.request import Functions, ModelFile, Request


class PlanError(RuntimeError):
    """The program could not be planned. ``traceback`` is where it failed, in the
    process that ran it; empty if that process died."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def plan(
    model_factory: Callable[[], Any],
    step_function: Callable[[Any], Any],
    *,
    world: int = 1,
    rank: int = 0,
    steps: int = 3,
    device_memory: int | None = None,
    gpu: str = "h100",
    nonzero: float | None = None,
    allocator: str | None = None,
    events: Literal["immediate", "at_sync"] = "immediate",
    time: bool = False,
    limit: float | None = None,
) -> Plan:
    """The memory that ``steps`` training steps take on ``rank`` of ``world`` GPUs.

    ``model_factory()`` builds model and optimizer, ``step_function(built)`` does one
    step and calls the optimizer's. Both write ``"cuda"`` for the device and find an
    initialised process group; they must be functions of an importable module, for they
    run in a new process, on torch's own CUDA over a driver that computes nothing.

    Args:
        device_memory: Bytes of the GPU, if not its own.
        gpu: ``"h100"``, ``"a100-80"`` or another of docs/plan.md.
        nonzero: The share of all elements that sizes depending on data take; default
            all, and of what routers choose an equal share.
        allocator: ``"expandable"``, or as ``PYTORCH_ALLOC_CONF``. None: what the
            environment says.
        events: When the host knows that work is done: the lower bound of what is
            reserved, or the upper one.
        time: Whether the simulated time of the last step is wanted, too.
        limit: Seconds after which the program is ended; default none.

    Raises:
        PlanError: When the program fails, never steps an optimizer, or takes longer
            than ``limit``.
        ValueError: For functions a new process cannot import, and a ``nonzero`` that
            is no share.
    """
    if nonzero is not None and not 0 <= nonzero <= 1:
        raise ValueError(
            "lowtide: plan: nonzero: expected a share of all elements, 0 to 1, got "
            f"{nonzero!r}."
        )
    for function in (model_factory, step_function):
        _require_importable(function)
    return plan_request(
        Request(
            Functions(model_factory, step_function),
            world=world,
            rank=rank,
            steps=steps,
            device_memory=device_memory,
            gpu=gpu,
            nonzero=nonzero,
            allocator=allocator_conf(allocator),
            events=events,
            time=time,
            limit=limit,
        )
    )


def allocator_conf(asked: str | None) -> str:
    """What is asked for as PYTORCH_ALLOC_CONF says it; for None what the environment
    has. ``expandable`` is short for its setting."""
    if asked is None:
        short = os.environ.get("PYTORCH_ALLOC_CONF", "")
        return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", short)
    return "expandable_segments:True" if asked == "expandable" else asked


def plan_request(
    request: Request,
    progress: Callable[[int], None] = lambda step: None,
    hear_calls: Callable[[dict[str, Any]], None] = lambda calls: None,
) -> Plan:
    """``progress`` hears of each step that is done, and of ``steps + 1`` when the
    recording is evaluated; ``hear_calls`` what NCCL was asked for, if the request says
    so, also of a program that fails. Raises :class:`PlanError`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        request = dataclasses.replace(request, told=str(told))
        process = context.Process(target=worker.main, args=(theirs, request))
        with _environment(request):
            process.start()
        theirs.close()
        try:
            return _answer(ours, process, request, progress, hear_calls)
        finally:
            if process.is_alive():
                ends.kill_group(process.pid or 0)
            process.join()
            ours.close()


def _answer(
    connection: Any,
    process: Any,
    request: Request,
    progress: Callable[[int], None],
    hear_calls: Callable[[dict[str, Any]], None],
) -> Plan:
    told = Path(request.told or "")
    try:
        return _receive(connection, request.limit, progress, hear_calls)
    except TimeoutError:
        line = ends.line_of_process(process.pid, told)
        name = worker.name_of(request.program)
        raise PlanError(
            f"lowtide: plan: {ends.at_limit(name, request.limit or 0, line)}"
        ) from None
    except EOFError:
        process.join()
        line = ends.last_line(told)
        where = f" at {line}" if line else ""
        raise PlanError(
            "lowtide: plan: expected the process that runs the program to answer, got "
            f"its end with status {process.exitcode}{where}. A negative status is a "
            "signal: -9 is often the host's memory running out, -11 with expandable "
            "segments one tensor that is larger than the GPU."
        ) from None


_starting = threading.Lock()


@contextlib.contextmanager
def _environment(request: Request) -> Iterator[None]:
    """Meanwhile that of this process is the new one's."""
    wanted = launch.environment(machine(request))
    wanted.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    wanted["PYTORCH_ALLOC_CONF"] = request.allocator
    with _starting:
        before = dict(os.environ)
        try:
            os.environ.clear()
            os.environ.update(wanted)
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


# What a saving advises -> the settings of a model file that do so.
_CHANGES: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint": "full"},
    "chunk_loss": {"loss": "chunked"},
    "shard": {"system": "fsdp2"},
}


def verify(
    plan: Plan, request: Request, progress: Callable[[int], None] = lambda step: None
) -> Plan:
    """``plan`` with what its savings save in runs of their own, for those that are a
    setting of a model file. Raises :class:`PlanError`."""
    program = request.program
    if not isinstance(program, ModelFile):
        return plan
    savings = []
    for saving in plan.savings:
        if saving.what in _CHANGES:
            changed = dataclasses.replace(program, **_CHANGES[saving.what])
            again = dataclasses.replace(request, program=changed, snapshot=None)
            again = dataclasses.replace(again, output=os.devnull)
            less = plan.peak_allocated - plan_request(again, progress).peak_allocated
            saving = dataclasses.replace(saving, by_run=less)
        savings.append(saving)
    return dataclasses.replace(plan, savings=savings)


def _receive(
    connection: Any,
    limit: float | None,
    progress: Callable[[int], None],
    hear_calls: Callable[[dict[str, Any]], None],
) -> Plan:
    """Raises TimeoutError when it is not there after ``limit`` seconds."""
    end = None if limit is None else clock.monotonic() + limit
    while True:
        if end is not None and not connection.poll(max(0.0, end - clock.monotonic())):
            raise TimeoutError
        kind, *content = connection.recv()
        if kind == "step":
            progress(content[0])
        elif kind == "calls":
            hear_calls(content[0])
        elif kind == "plan":
            plan: Plan = content[0]
            return plan
        else:
            raise PlanError(*content)


def _require_importable(function: Callable[..., Any]) -> None:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            "lowtide: plan: expected functions of a module, which a new process can "
            f"import, got {name}. Define it at the top level of a file."
        ) from None
