"""One answer for all ranks: a step happened, or it did not.

[Note: One register]
A rank that has come to the end of a step counts itself in the default group's store,
and the one that makes the count complete writes that the step happened. A rank that
raises writes what it raised, in the same place. What is written first is everybody's
answer: nobody waits for a rank that failed, one that waits can give up, and no device
and no communicator is asked. Steps of a process group have numbers, which its ranks
count alike; one that is made anew counts from nothing, as ranks that join it do. The
store may be the one of the group before, so the last rank that has its answer leaves
nothing of a step there.
"""

import contextlib
import dataclasses
import datetime
import time
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from lowtide._base.failures import text_of

_HAPPENED = "happened"
_LONGEST_SLEEP = 0.05  # seconds between two looks
# Of the next step, by group.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True)
class Answer:
    happened: bool
    rank: int = 0  # the rest: of the first that raised, unless it happened
    out_of_memory: bool = False
    text: str = ""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


class Decision:
    """Of the ranks of a process group, about one step."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = 0, 1
        if not dist.is_initialized():
            return
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.rank, self.size = group.rank(), group.size()
        self._number = _numbers.get(group, 0)
        _numbers[group] = self._number + 1
        self._timeout = _timeout(group)
        self._store = dist.PrefixStore(
            f"lowtide/step/{group.group_name}",
            dist.distributed_c10d._get_default_store(),
        )

    def done(
        self,
        while_waiting: Callable[[], None],
        timeout: datetime.timedelta | None = None,
    ) -> Answer:
        """This rank is through with the step. Waits for the others or one that raises,
        by default as long as the group would; ``while_waiting`` may raise to give up,
        and :meth:`failed` is then to be called."""
        if self.size == 1:
            return Answer(True)
        longest = (timeout or self._timeout).total_seconds()
        try:
            if self._count(1) == self.size:
                return self._write(_HAPPENED)
            began = time.monotonic()
            while not self._is_written():
                while_waiting()
                waited = time.monotonic() - began
                if waited > longest:
                    there = f"{self._count(0)} of {self.size} ranks"
                    return self.failed(TimeoutError(f"{there} after {waited:.0f} s"))
                time.sleep(min(_LONGEST_SLEEP, 0.0002 + waited / 8))
            return self._write(_HAPPENED)  # another was first
        except _StoreGone as error:
            return Answer(False, self.rank, text=text_of(error))

    def failed(self, error: BaseException) -> Answer:
        """This rank has raised. That the step happened is the answer only to one that
        called :meth:`done` before."""
        kind = "memory" if is_out_of_memory(error) else "error"
        said = f"{self.rank} {kind} {text_of(error)}"
        try:
            return self._write(said) if self.size > 1 else _read(said)
        except _StoreGone:
            return _read(said)

    def _count(self, added: int) -> int:
        with _store_errors():
            return self._store.add(f"{self._number}/done", added)

    def _is_written(self) -> bool:
        with _store_errors():
            return self._store.check([f"{self._number}/answer"])

    def _write(self, text: str) -> Answer:
        """Unless there is one; what is there then."""
        with _store_errors():
            key = f"{self._number}/answer"
            answer = _read(self._store.compare_set(key, "", text).decode())
        self._forget()
        return answer

    def _forget(self) -> None:
        """Once all ranks have their answer. Whoever keeps the store may have ended."""
        with contextlib.suppress(RuntimeError):
            if self._store.add(f"{self._number}/read", 1) == self.size:
                for what in ("done", "answer", "read"):
                    self._store.delete_key(f"{self._number}/{what}")


class _StoreGone(RuntimeError):
    """With the process that kept it."""


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _StoreGone(text_of(error)) from error


def _read(text: str) -> Answer:
    if text == _HAPPENED:
        return Answer(True)
    rank, kind, said = text.split(" ", 2)
    return Answer(False, int(rank), kind == "memory", said)


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """The group's own, of the device it is for."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    given: datetime.timedelta | None = getattr(options, "_timeout", None)
    return given or dist.distributed_c10d.default_pg_timeout
