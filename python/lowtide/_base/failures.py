"""Which rank raised first, for the errors of those that waited for it.

A process that ends by an exception says so in the default group's store before its
connections close; a peer whose collective fails, or does not finish on its device, then
looks there (``csrc/comm/first_failure.h``). Nothing is known
where the store went with the rank (rank 0's own, without an agent that keeps it), where
a program catches the exception, and of processes that are killed.
"""

import contextlib
import sys
from types import TracebackType

import torch.distributed as dist

from lowtide import _C

_KEY = "lowtide/first_failure"
_installed = False


def name_failed_ranks() -> None:
    """Of this process, to others, and of others in this one's errors; again for a
    default group that came after another."""
    global _installed
    _C.find_first_failure_in(
        dist.distributed_c10d._get_default_group().group_name, _KEY
    )
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def tell(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(Exception):
            _say(error)
        before(kind, error, traceback)

    sys.excepthook = tell


def text_of(error: BaseException) -> str:
    """Its first line; that of an error of ours is all of it."""
    text = str(error)
    if text.startswith("lowtide: "):
        return text
    lines = text.splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _say(error: BaseException) -> None:
    if dist.is_initialized():
        said = f"{dist.get_rank()} {text_of(error)}"
        # The first stays: what peers raise for it comes later.
        dist.distributed_c10d._get_default_store().compare_set(_KEY, "", said)
