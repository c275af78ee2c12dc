"""Objects that ranks exchange, which torch would send as bytes of device tensors: over
the store that they share, or of ranks that are not there this one's own."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import calls, values
from .stores import LONGEST_WAIT, SharedStore, ended_key

_NOT_SENT = "what another rank would send is the object that was there"


def install(store: SharedStore | None) -> None:
    """For the rest of the process. Without a store this rank is alone."""
    exchange = _Exchange(store)
    for name in (
        *("all_gather_object", "gather_object"),
        *("broadcast_object_list", "scatter_object_list"),
    ):
        function = getattr(exchange, name)
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)


class _Exchange:
    """torch's functions of these names."""

    def __init__(self, store: SharedStore | None) -> None:
        self._store = store
        self._numbers: Counter[str] = Counter()  # of calls, by group

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: Any = None
    ) -> None:
        if call := self._begin("all_gather_object", group):
            call.give(obj)
            object_list[:] = call.take_all(obj)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        if call := self._begin("gather_object", group, dst or 0, group_dst):
            call.give(obj)
            if call.is_root and object_gather_list is not None:
                object_gather_list[:] = call.take_all(obj)

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        if call := self._begin("broadcast_object_list", group, src or 0, group_src):
            if call.is_root:
                call.give(object_list)
            else:
                object_list[:] = call.take_roots(list(object_list))

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        if call := self._begin("scatter_object_list", group, src or 0, group_src):
            given = scatter_object_input_list
            if call.is_root:
                call.give(given)
            given = given or [scatter_object_output_list[0]] * len(call.ranks)
            scatter_object_output_list[0] = call.take_roots(given)[call.rank]

    def _begin(
        self,
        kind: str,
        group: Any,
        root: int | None = None,
        group_root: int | None = None,
    ) -> _Call | None:
        """None where this rank is not in the group."""
        if dist.get_rank(group) < 0:
            return None
        group = group or distributed_c10d._get_default_group()
        if root is not None and group_root is None:
            group_root = dist.get_group_rank(group, root)
        self._numbers[group.group_name] += 1
        number = self._numbers[group.group_name]
        return _Call(self._store, kind, group, group_root, number)


class _Call:
    """The ``number``-th exchange of a group; ``root``, if it has one, and ``rank`` are
    by rank in it, ``ranks`` are those of the world."""

    def __init__(
        self,
        store: SharedStore | None,
        kind: str,
        group: Any,
        root: int | None,
        number: int,
    ) -> None:
        self.root = root
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._store = store
        self._kind = kind
        self._key = f"lowtide/objects/{group.group_name}/{number}"
        place = -1 if root is None else root
        calls.note_objects(kind, group.group_name, self.ranks, place)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    def give(self, obj: Any) -> None:
        if self._store is not None:
            self._store.set(f"{self._key}/{self.rank}", pickle.dumps((self._kind, obj)))

    def take_all(self, own: Any) -> list[Any]:
        return [self._take(rank, own) for rank in range(len(self.ranks))]

    def take_roots(self, otherwise: Any) -> Any:
        assert self.root is not None
        if self._store is None and not self.is_root:
            values.notes[_NOT_SENT, values.where()] += 1
        return self._take(self.root, otherwise)

    def _take(self, rank: int, otherwise: Any) -> Any:
        """``otherwise``: what stands for the object of a rank that is not there."""
        if self._store is None:
            return otherwise
        key = f"{self._key}/{rank}"
        self._wait(self._store, key, self.ranks[rank])
        kind, obj = pickle.loads(self._store.get(key))
        if kind != self._kind:
            raise self._refused(self.ranks[rank], f"its {kind}")
        return obj

    def _wait(self, store: SharedStore, key: str, rank: int) -> None:
        end = time.monotonic() + LONGEST_WAIT.total_seconds()
        while not store.check([key]):
            # What a rank that has ended wrote before is there by now.
            if store.check([ended_key(rank)]) and not store.check([key]):
                raise self._refused(rank, "its end")
            if time.monotonic() > end:
                raise self._refused(rank, f"nothing for {LONGEST_WAIT.seconds} s")
            time.sleep(0.02)

    def _refused(self, rank: int, got: str) -> RuntimeError:
        return RuntimeError(
            f"lowtide: phantom: {self._kind}: expected rank {rank} to come to it, too, "
            f"got {got}. Let every rank of the group exchange objects alike."
        )
