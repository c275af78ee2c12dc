"""What a process asks of NCCL, in order, and where in the program it does.

Objects that ranks exchange are calls, too, though none of NCCL's.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import driver, groups, values
from .untraced import untraced

# The frame in which a thread waits for autograd's.
_BACKWARD = "_engine_run_backward"


class Around(NamedTuple):
    """``where``: the line of the program; on a thread of autograd that of the backward
    that it works for, and ``node`` is what runs; ``range``: the innermost one that a
    profiler would show; ``operation``: torch's name."""

    where: str
    node: str = ""
    range: str = ""
    operation: str = ""


# By number of the call.
_around: dict[int, Around] = {}
# Behind how many calls of NCCL objects were exchanged, and how.
_objects: list[tuple[int, dict[str, Any]]] = []
_groups_of_objects: dict[tuple[str, tuple[int, ...]], driver.Communicator] = {}


def install() -> None:
    """For the rest of the process."""
    library = Path(__file__).parents[2] / "liblowtide_dry_observer.so"
    observer = ctypes.CDLL(str(library))
    observer.lowtide_dry_follow_ranges()
    around = observer.lowtide_dry_around_call
    around.restype = ctypes.c_char_p

    @untraced
    def hear(number: int) -> None:
        _around[number] = Around(*_place(), *around().decode().split("\t"))

    driver.hear_calls(hear)


def note_objects(
    kind: str, operation: str, name: str, ranks: Sequence[int], root: int = -1
) -> None:
    """Ranks exchange objects in the group ``name``; ``root``: by rank in the group."""
    key = name, tuple(ranks)
    if key not in _groups_of_objects:
        number = -1 - len(_groups_of_objects)
        _groups_of_objects[key] = driver.Communicator(
            number, -1, len(ranks), tuple(ranks), f"{name}/objects"
        )
    number = _groups_of_objects[key].number
    call = driver.Call(kind, 0, "-", "-", root, number, 0, 0, 0, 0, 0)
    around = Around(*_place(), operation=operation)
    _objects.append((driver.num_calls(), call._asdict() | around._asdict()))


def collect() -> dict[str, Any]:
    """For JSON; :mod:`.call_logs` reads it."""
    nowhere = Around("")
    calls = [
        call._asdict() | _around.get(number, nowhere)._asdict()
        for number, call in enumerate(driver.calls())
    ]
    for place, call in reversed(_objects):
        calls.insert(place, call)
    communicators = [
        each._asdict() | {"purpose": groups.purpose_of(each.name)}
        for each in (*driver.communicators(), *_groups_of_objects.values())
    ]
    return {"communicators": communicators, "calls": calls}


def _place() -> tuple[str, str]:
    """Where in the program, and in which node of autograd."""
    if line := values.line_of(sys._getframe()):
        return line, ""
    node = torch._C._current_autograd_node()
    name = "at its end" if node is None else str(node.name())
    waiting = [
        frame
        for frame in sys._current_frames().values()
        if frame.f_code.co_name == _BACKWARD
    ]
    if len(waiting) == 1:
        return values.line_of(waiting[0]), name
    return "", name
