"""Process groups of lowtide's own.

[Note: Names of our groups]
Ranks meet in the store under their group's name, and torch names a group by how many
this rank has made, or has. Of ranks of which one made a group alone, each would wait
for the others under a name of its own. Ours are named by their purpose, their ranks and
how many of that purpose these ranks have made, in which every one of them takes part;
and torch does not count them, so no name of the program's depends on them.
"""

import collections
import contextlib
import datetime
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

# By the world they are in: another one's ranks are others, and so is its store.
_made: weakref.WeakKeyDictionary[
    dist.ProcessGroup, collections.Counter[tuple[str, tuple[int, ...]]]
] = weakref.WeakKeyDictionary()


def new_group(
    ranks: Sequence[int],
    purpose: str,
    *,
    backend: str,
    timeout: datetime.timedelta | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """Over ``ranks``, which are global; ``purpose`` is its description, too, the
    timeout the backend's own unless it is given. Collective over them alone, whichever
    groups each has made before."""
    with _named(_name(tuple(ranks), purpose)), _no_split() as bound_device:
        made = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=purpose,
            device_id=bound_device if backend != "gloo" else None,
        )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _name(ranks: tuple[int, ...], purpose: str) -> str:
    world = dist.group.WORLD
    assert world is not None
    counts = _made.setdefault(world, collections.Counter())
    count = counts[purpose, ranks]
    counts[purpose, ranks] += 1
    digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    return f"{purpose}_{digest}_{count}"


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Lets the group that is made meanwhile have this name."""
    theirs = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: GroupName(name)
    try:
        yield
    finally:
        distributed_c10d._process_group_name = theirs


@contextlib.contextmanager
def _no_split() -> Iterator[torch.device | None]:
    """Lets groups that are made meanwhile be no splits of the default group.

    Where that one is bound to a device, new_group makes NCCL's communicators by
    ncclCommSplit, which waits for every rank of the job; only the group's come here."""
    default = dist.group.WORLD
    assert default is not None
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device
