"""The process that runs a program and records it."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType

from lowtide.phantom.dry import calls, driver, ends, launch
from lowtide.planning.analysis import Analysis
from lowtide.planning.build import build_plan
from lowtide.planning.dry_device import DryDevice
from lowtide.planning.model_file import train_model_file
from lowtide.planning.recording import Finished, Recorder
from lowtide.planning.report import Plan
from lowtide.planning.request import ModelFile, Program, Request, Script
from lowtide.planning.script import run_script
from lowtide.planning.stacks import Line


def main(connection: Connection, request: Request) -> None:
    """Sends ``("step", number)`` for each step, ``("calls", dict)`` of NCCL if they are
    asked for, then ``("plan", Plan)`` or ``("error", message, traceback)``."""
    _redirect_output(request.output)
    if request.limit is not None:
        os.setpgid(0, 0)  # what it starts ends with it
    if request.told is not None:
        ends.tell(request.told)
    multiprocessing.set_start_method(None, force=True)  # the platform's, not our own
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        plan = run(request, lambda number: connection.send(("step", number)))
        answer: tuple[object, ...] = ("plan", plan)
    except BaseException as error:
        answer = ("error", message_of(error), stack_of(error))
    if request.calls:
        connection.send(("calls", calls.collect()))
    connection.send(answer)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    _end(0)


def _end_with_parent() -> None:
    """This process is no daemon: those may not have DataLoader workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _end(1)


def _end(status: int) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)  # threads and groups that a program left behind do not matter


def run(request: Request, progress: Callable[[int], None]) -> Plan:
    begin = time.perf_counter()
    device = DryDevice(request)
    recorder = Recorder(device, num_steps=request.steps, progress=progress)
    recorder.start()

    def program() -> None:
        try:
            _run_program(request.program, recorder)
        except Finished:
            pass
        finally:
            recorder.stop()

    device.run(program)
    notes = device.notes
    _check_steps(request, recorder, notes)
    notes += device.assumptions()
    progress(request.steps + 1)
    gc.freeze()
    analysis = Analysis.of(recorder, device.history(recorder))
    if request.snapshot is not None:
        device.write_snapshot(analysis, request.snapshot)
    step_time = device.step_time(analysis)
    return build_plan(
        analysis,
        program=name_of(request.program),
        world=request.world,
        rank=request.rank,
        device_memory=device.memory(),
        step_time=step_time,
        pinned=device.pinned(),
        communicators=device.communicators(),
        notes=notes,
        seconds=time.perf_counter() - begin,
    )


def name_of(program: Program) -> str:
    if isinstance(program, ModelFile):
        parts = [program.path, program.config, program.system]
        return " ".join(part for part in parts if part)
    if isinstance(program, Script):
        return " ".join(program.words)
    return program.step.__qualname__


def _run_program(program: Program, recorder: Recorder) -> None:
    if isinstance(program, ModelFile):
        train_model_file(program, recorder.num_steps, recorder.modules.add)
    elif isinstance(program, Script):
        run_script(program)
    else:
        _start_group()
        state = program.factory()
        for _ in range(recorder.num_steps):
            program.step(state)


def _start_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl")


def _check_steps(request: Request, recorder: Recorder, notes: list[str]) -> None:
    done = len(recorder.step_ends)
    if done == 0:
        raise RuntimeError(
            "lowtide: plan: expected a program that calls the step() of a "
            f"torch.optim.Optimizer, got none when {name_of(request.program)} ended. "
            "Check that it trains with these arguments, and not in processes that it "
            "starts."
        )
    if not recorder.allocations:
        raise RuntimeError(
            "lowtide: plan: expected a program that trains on 'cuda', got nothing "
            f"there in {done} steps of {name_of(request.program)}. Move its model and "
            "data to 'cuda', or ask for the device in its arguments."
        )
    if done < request.steps:
        notes.append(f"the program ended after {done} of {request.steps} steps")
    for name in recorder.waiting():
        notes.append(
            f"{name} did not step as often: what it holds from its first steps on may "
            "not be in the figures"
        )
    for name, count in collections.Counter(recorder.idle_steps).items():
        notes.append(
            f"{name} stepped without gradients, {count} times in {done} steps: what "
            "the program decides by values read back, 1 or False, may have dropped them"
        )


def message_of(error: BaseException) -> str:
    """One line in the house's words; errors of lowtide keep theirs."""
    text = str(error)
    if text.startswith("lowtide: "):
        return text
    lacking = driver.missing() if "not supported" in text.lower() else []
    if lacking:
        text = text.splitlines()[0]
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if Line(frame.filename, frame.lineno or 0, frame.name).is_in_program:
            where = f" at {frame.filename}:{frame.lineno}"
    return (
        "lowtide: plan: expected the program to train, got "
        f"{type(error).__name__}{where}: {text}. {_next_step(error, lacking)}"
    )


def stack_of(error: BaseException) -> str:
    """From the program's first line on, without the error itself, which the message
    has; empty for an error that no line of the program led to."""
    begin = error.__traceback__
    while begin is not None and not _is_in_program(begin):
        begin = begin.tb_next
    if begin is None:
        return ""
    text = "".join(traceback.format_exception(type(error), error, begin))
    return text.removesuffix("".join(traceback.format_exception_only(error)))


def _is_in_program(entry: TracebackType) -> bool:
    code = entry.tb_frame.f_code
    return Line(code.co_filename, entry.tb_lineno, code.co_name).is_in_program


def _next_step(error: BaseException, lacking: list[str]) -> str:
    if isinstance(error, SystemExit):
        return "Check its arguments and what it printed."
    if isinstance(error, KeyError) and error.args[0] in launch.OF_TORCHRUN:
        return "Pass --world N, which sets it as torchrun does."
    if lacking:
        return (
            f"The driver that computes nothing lacks {', '.join(lacking)}: leave this "
            "part of CUDA out where LOWTIDE_DRY_GPU is set, and please report it."
        )
    return (
        "Values that only the GPU computes read as 1 or False; run the program on the "
        "CPU to see whether it fails there too."
    )


def _redirect_output(path: str | None) -> None:
    """Stdout is the plan's."""
    if path is None:
        os.dup2(2, 1)
        return
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
