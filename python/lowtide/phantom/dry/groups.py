"""Tells the dry driver which ranks of the world each communicator of NCCL is of.

A communicator begins with an id that a rank puts into the store of its group, under
the group's name; the others find it there. A part that is split off another
communicator is made on the thread that asked for it.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import driver

_ID_BYTES = 128
# What an id's key has behind its group: a number, that of one of several roots, or the
# two ranks of a pair; of nccl2 (torch 2.14) names, the pair's ranks and numbers.
_ENDS = (
    re.compile(r"(?:UniqueNCCLID:)?(\d+)(?::(\d+))?"),
    re.compile(r".*?(?:/p2p-(\d+)-(\d+)-\d+/.*)?/nccl_storekey_\d+(?:_\d+)?"),
)
# Of each group that was made, by its name: ranks of the world; what torch calls it.
_ranks: dict[str, tuple[int, ...]] = {}
_purposes: dict[str, str] = {}


def install() -> None:
    """For the rest of the process."""
    internals: Any = distributed_c10d
    internals._new_process_group_helper = _named(internals._new_process_group_helper)
    group: Any = dist.ProcessGroup
    group.split_group = _split(group.split_group)


def ids_of(key: str) -> bytes:
    """What another rank would have put there."""
    return hashlib.shake_256(key.encode()).digest(_ID_BYTES)


def purpose_of(communicator: str) -> str:
    """What torch calls the group of the communicator with that name."""
    return _purposes.get(communicator.partition("/")[0], "")


def hear(key: str, value: bytes) -> None:
    """``value`` was read from the store, or is put there.

    The key of an id is the group's name, for some groups the device, and what of the
    group it is: ``0//cuda//1:5``, ``0//cuda//0/p2p-1-5-0/0/p2p-1-5-0/nccl_storekey_0``.
    """
    *names, last = key.split("//")
    found = next((end for end in (e.fullmatch(last) for e in _ENDS) if end), None)
    if found is None or not names or len(value) != _ID_BYTES:
        return
    if names[-1] == "cuda" and len(names) > 1:
        names.pop()
    name = names[-1].rpartition("/")[2]
    ranks = _ranks.get(name, ())
    one, other = found.groups()
    if other is not None and ranks:
        ranks = ranks[int(one)], ranks[int(other)]
        name = f"{name}/{one}:{other}"
    driver.name_group(value, name, ranks)


def _named(make: Callable[..., Any]) -> Callable[..., Any]:
    """torch makes every group by one function."""

    @functools.wraps(make)
    def made(
        group_size: int,
        group_rank: int,
        global_ranks_in_group: Sequence[int],
        backend: Any,
        store: Any,
        group_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ranks = tuple(global_ranks_in_group) or tuple(range(group_size))
        _ranks[group_name] = ranks
        _purposes[group_name] = kwargs.get("group_desc") or ""
        driver.name_split(group_name, ranks)
        return make(
            group_size,
            group_rank,
            global_ranks_in_group,
            backend,
            store,
            group_name,
            *args,
            **kwargs,
        )

    return made


def _split(split: Callable[..., Any]) -> Callable[..., Any]:
    """``dist.split_group`` makes its groups by this method, whose ranks are those of
    the group that is split."""

    @functools.wraps(split)
    def made(
        self: Any,
        ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        world = dist.get_process_group_ranks(self)
        name = group_name or ""
        _ranks[name] = tuple(world[rank] for rank in ranks)
        _purposes[name] = kwargs.get("group_desc") or ""
        driver.name_split(name, _ranks[name])
        return split(self, ranks, timeout, opts, group_name, *args, **kwargs)

    return made
