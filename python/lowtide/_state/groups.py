"""The two communicators of a mesh.

[Note: Two communicators]
Gathers are ordered by the units' forwards and backwards, reduce-scatters by the
gradient plan. Each order is the same on every rank, but how the two interleave is
not: a rank that leaves a parameter unused completes its chunks later. One
communicator for both would deadlock or mix them up; two can not, and on NCCL they
also overlap.
"""

import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowtide import _C

Pair = tuple[_C.Collectives, _C.Collectives]

# By the name of the mesh's group, so every unit on a mesh shares the pair. The group
# itself tells whether it is still that one: names come again after
# destroy_process_group.
_pairs: dict[str, tuple[dist.ProcessGroup, Pair]] = {}


def gather_and_reduce(mesh: DeviceMesh, device: torch.device) -> Pair:
    """The mesh's own group for gathers and a second one over the same ranks for
    reduce-scatters. Collective over the mesh on first use."""
    group = mesh.get_group()
    known = _pairs.get(group.group_name)
    if known is not None and known[0] is group:
        return known[1]
    reduce_group = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout(group, device),
        backend=dist.get_backend(group),
        use_local_synchronization=True,
        group_desc="lowtide_reduce",
    )
    assert reduce_group is not None
    pair = (
        _C.Collectives(group.group_name, device),
        _C.Collectives(reduce_group.group_name, device),
    )
    _pairs[group.group_name] = (group, pair)
    return pair


def _timeout(
    group: dist.ProcessGroup, device: torch.device
) -> datetime.timedelta | None:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
