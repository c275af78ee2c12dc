"""What torch's allocator would reserve for the same requests under other settings.

Its settings and its memory are a process's, so every question is answered by a process
of its own, forked from one that never used CUDA.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from lowtide.phantom.dry import driver
from lowtide.planning.history import Operation, Replayed, Settings


class _Question(NamedTuple):
    requests: bytes
    capacity: int
    immediate: bool
    conf: str


class Replays:
    """Forks: to be made before the process uses CUDA. Over the dry driver alone."""

    def __init__(self, observer: ctypes.CDLL) -> None:
        self._connection, theirs = Pipe()
        if (child := os.fork()) == 0:
            self._connection.close()
            if os.fork() == 0:  # whose end no `wait` of the program's meets
                _serve(theirs, observer)
            os._exit(0)
        os.waitpid(child, 0)
        theirs.close()

    def ask(
        self,
        operations: Sequence[Operation],
        settings: Settings,
        capacity: int,
    ) -> Replayed:
        """``capacity``: bytes of the device."""
        immediate = settings.events == "immediate"
        conf = settings.conf
        question = _Question(_requests(operations), capacity, immediate, conf)
        self._connection.send(question)
        answer: Replayed | str = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(
                "lowtide: plan: expected an answer of torch's allocator to the same "
                f"requests with {conf or 'its defaults'}, got {answer}. Please report "
                "it."
            )
        return answer


# csrc/phantom/observer/replay.h
_ALLOCATE, _RECORD, _FREE, _WAIT_STREAM, _WAIT_DEVICE, _EMPTY_CACHE = range(6)
_KINDS = {
    "allocate": _ALLOCATE,
    "record": _RECORD,
    "free": _FREE,
    "synchronize": _WAIT_STREAM,
    "empty_cache": _EMPTY_CACHE,
}


def _requests(operations: Sequence[Operation]) -> bytes:
    """What a pool has on a stream is asked for on a stream of its own: the allocator
    keeps these as far apart."""
    numbers, apart = array("q"), dict[tuple[int, int], int]()
    for o in operations:
        everywhere = o.op == "synchronize" and o.stream is None
        kind = _WAIT_DEVICE if everywhere else _KINDS[o.op]
        stream = o.stream or 0
        if o.pool:
            stream = apart.setdefault((o.pool, stream), -1 - len(apart))
        numbers.extend((kind, o.id or 0, o.bytes or 0, stream))
    return numbers.tobytes()


def _serve(connection: Connection, observer: ctypes.CDLL) -> None:
    """Until nobody can ask any more."""
    while True:
        try:
            question = connection.recv()
        except EOFError:
            os._exit(0)
        if os.fork() == 0:
            try:
                connection.send(_answer(observer, question))
            except Exception as error:
                connection.send(f"{type(error).__name__}: {error}")
            os._exit(0)
        _, status = os.wait()
        if status != 0:
            connection.send(f"exit status {os.waitstatus_to_exitcode(status)}")


class _Answer(ctypes.Structure):
    _fields_ = [
        ("fits", ctypes.c_int64),
        ("peak_reserved", ctypes.c_int64),
        ("retries", ctypes.c_int64),
    ]


def _answer(observer: ctypes.CDLL, question: _Question) -> Replayed:
    driver.set_bounds(0, question.capacity, question.immediate)
    if question.conf:
        torch._C._accelerator_setAllocatorSettings(question.conf)
    torch.cuda.init()
    replay = observer.lowtide_dry_replay
    replay.restype = _Answer
    count = len(question.requests) // (4 * 8)
    answer = replay(question.requests, ctypes.c_int64(count))
    return Replayed(bool(answer.fits), answer.peak_reserved, answer.retries)
