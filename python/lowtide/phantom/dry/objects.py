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

# Both ends of what is sent and received are one exchange.
_OF_PAIRS = dict.fromkeys(("send", "recv"), "send_object_list")
_NOT_SENT = "what another rank would send is the object that was there"


def install(store: SharedStore | None) -> None:
    """For the rest of the process. Without a store this rank is alone."""
    exchange = _Exchange(store)
    for name in (
        *("all_gather_object", "gather_object"),
        *("broadcast_object_list", "scatter_object_list"),
        *("send_object_list", "recv_object_list"),
    ):
        function = getattr(exchange, name)
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)


class _Exchange:
    """torch's functions of these names."""

    def __init__(self, store: SharedStore | None) -> None:
        self._store = store
        self._numbers: Counter[str] = Counter()  # of calls, by group and ends

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

    def send_object_list(
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        if call := self._between("send", group, dst, group_dst):
            call.give(object_list)

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        use_batch: bool = False,
    ) -> int:
        """The rank of the world that sent them."""
        call = self._between("recv", group, src, group_src)
        if call is None:
            return -1
        object_list[:] = call.take_senders()
        return call.ranks[call.root or 0]

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
        return _Call(self._store, kind, group, group_root, self._next(group.group_name))

    def _between(
        self, kind: str, group: Any, peer: int | None, group_peer: int | None
    ) -> _Call | None:
        if dist.get_rank(group) < 0:
            return None
        group = group or distributed_c10d._get_default_group()
        if group_peer is None:
            assert peer is not None
            group_peer = dist.get_group_rank(group, peer)
        ends = [dist.get_rank(group), group_peer]
        sender, receiver = ends if kind == "send" else reversed(ends)
        key = self._next(f"{group.group_name}/{sender}>{receiver}")
        return _Call(self._store, kind, group, group_peer, key)

    def _next(self, name: str) -> str:
        self._numbers[name] += 1
        return f"lowtide/objects/{name}/{self._numbers[name]}"


class _Call:
    """One exchange of a group; ``root``, if it has one or is between two ranks, and
    ``rank`` are by rank in it, ``ranks`` are those of the world."""

    def __init__(
        self,
        store: SharedStore | None,
        kind: str,
        group: Any,
        root: int | None,
        key: str,
    ) -> None:
        self.root = root
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._store = store
        self._kind = _OF_PAIRS.get(kind, kind)
        self._key = key
        place = -1 if root is None else root
        calls.note_objects(kind, self._kind, group.group_name, self.ranks, place)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    def give(self, obj: Any) -> None:
        if self._store is not None:
            self._store.set(f"{self._key}/{self.rank}", pickle.dumps((self._kind, obj)))

    def take_all(self, own: Any) -> list[Any]:
        """``own`` stands for what ranks that are not there would give."""
        if self._store is None:
            return [own] * len(self.ranks)
        return [self._take(self._store, rank) for rank in range(len(self.ranks))]

    def take_roots(self, otherwise: Any) -> Any:
        assert self.root is not None
        if self._store is not None:
            return self._take(self._store, self.root)
        if not self.is_root:
            values.notes[_NOT_SENT, values.where()] += 1
        return otherwise

    def take_senders(self) -> Any:
        assert self.root is not None
        if self._store is not None:
            return self._take(self._store, self.root)
        sender = self.ranks[self.root]
        raise RuntimeError(
            f"lowtide: phantom: {self._kind}: expected rank {sender} to run beside "
            f"rank {self.ranks[self.rank]}, got one that is alone. Run all ranks: "
            "--ranks all."
        )

    def _take(self, store: SharedStore, rank: int) -> Any:
        key = f"{self._key}/{rank}"
        self._wait(store, key, self.ranks[rank])
        kind, obj = pickle.loads(store.get(key))
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
