"""The ranks that save or load together: what one of them raises, all raise."""

import atexit
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lowtide._base.failures import text_of
from lowtide._base.process_groups import new_group
from lowtide.saving.errors import CheckpointError

_Value = TypeVar("_Value")

# Groups of gloo for whoever was asked for.
# [Note: Objects in a group's threads]
# gloo's threads let go of a call's tensors whenever they come to it, and what carried
# objects (here and in torch's own saving) has Python's: where the interpreter ends
# before them, the process does, too (std::terminate). Only the end of the group waits
# for them. So nothing of ours keeps a group that destroy_process_group has ended, and
# what nobody ended ends before the interpreter.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _end_groups() -> None:
    for made in [made() for made in _known.values()]:
        if made is not None and _exists(made):
            dist.destroy_process_group(made)


class Ranks:
    """A process, or all of a process group, on a gloo group that only checkpoints
    use: one in the background never meets a step's collectives."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """Collective over the group on first use."""
        self.group = _gloo_beside(process_group) if dist.is_initialized() else None

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group is not None else 0

    @property
    def size(self) -> int:
        return self.group.size() if self.group is not None else 1

    def run(self, who: str, function: Callable[[], _Value]) -> _Value:
        """What ``function`` returns here. Where it raises on any rank, CheckpointError
        on all of them. Collective."""
        value: list[_Value] = []
        self.gather(who, lambda: value.append(function()))
        return value[0]

    def gather(self, who: str, function: Callable[[], _Value]) -> list[_Value]:
        """The same, what it returns on every rank, by rank."""
        value: _Value | None = None
        error: str | None = None
        cause: BaseException | None = None
        try:
            value = function()
        except BaseException as raised:
            error, cause = text_of(raised), raised
        everyone = self._exchange(who, (value, error))
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # what interrupts this rank is not to be caught as an error
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                raise self.failed(who, rank, theirs) from cause
        return [cast(_Value, value) for value, _ in everyone]

    def first(self, who: str, function: Callable[[], _Value]) -> _Value:
        """What ``function`` returns on rank 0, where alone it runs. Collective."""
        if self.rank == 0:
            return self.gather(who, function)[0]
        return cast(list[_Value], self.gather(who, lambda: None))[0]

    def _exchange(self, who: str, mine: Any) -> list[Any]:
        if self.group is None:
            return [mine]
        everyone: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(everyone, mine, group=self.group)
        except RuntimeError as error:
            raise self.gone(who, error) from error
        return everyone

    def gone(self, who: str, error: Exception) -> CheckpointError:
        """A rank does not answer."""
        return CheckpointError(
            f"lowtide: {who}: expected {self.size} ranks to answer, got "
            f"{text_of(error)} (rank {self.rank}). A rank has ended: start again from "
            "the last checkpoint, which is whole."
        )

    def failed(self, who: str, rank: int, text: str) -> CheckpointError:
        if text.startswith("lowtide: "):
            return CheckpointError(text)
        return CheckpointError(
            f"lowtide: {who}: expected every rank to succeed, got on rank {rank} of "
            f"{self.size}: {text}. Nothing was changed; remove the cause and call it "
            "again."
        )

    def explained(self, who: str, exception: CheckpointException) -> CheckpointError:
        """torch's exception names all ranks that raised: the lowest is shown."""
        rank = min(exception.failures)
        return self.failed(who, rank, text_of(exception.failures[rank][0]))


def _gloo_beside(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    asked = process_group if process_group is not None else dist.group.WORLD
    assert asked is not None
    known = _known.get(asked, lambda: None)()
    if known is not None and _exists(known):
        return known
    ranks = dist.get_process_group_ranks(asked)
    made = new_group(ranks, "lowtide_checkpoints", backend="gloo")
    _known[asked] = weakref.ref(made)
    return made


def _exists(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_backend(group)
    except ValueError:  # it has been destroyed
        return False
    return True
