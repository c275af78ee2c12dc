"""The communicators of a mesh.

[Note: Two communicators]
Gathers are ordered by the units' forwards and backwards, reduce-scatters by the
gradient plan. Each order is the same on every rank, but how the two interleave is
not: a rank that leaves a parameter unused completes its chunks later. One
communicator for both would deadlock or mix them up; two can not, and on NCCL they
also overlap. Sums over replicas follow the plan's order on a third.

LOWTIDE_COMMUNICATORS=shared uses the mesh's own for both, which saves NCCL's buffers of
one. It is for models whose ranks use the same parameters in every step; their
communication no longer overlaps.
"""

import dataclasses
import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowtide import _C


@dataclasses.dataclass(frozen=True)
class Groups:
    gather: _C.Collectives
    reduce: _C.Collectives
    replicas: _C.Collectives | None
    # What they stand for.
    gather_process_group: dist.ProcessGroup
    reduce_process_group: dist.ProcessGroup


# By the names of the mesh's groups, so every unit on a mesh shares them. The groups
# themselves tell whether they are still those: names come again after
# destroy_process_group.
_known: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], Groups]] = {}


def groups_of(mesh: DeviceMesh, device: torch.device) -> Groups:
    """The mesh's own group of shards for gathers, a second one over the same ranks for
    reduce-scatters, and its group of replicas if it has two dimensions. Collective
    over the mesh on first use."""
    groups = mesh_groups(mesh)
    names = tuple(group.group_name for group in groups)
    known = _known.get(names)
    if known is not None and all(
        one is other for one, other in zip(known[0], groups, strict=True)
    ):
        return known[1]
    *replicas, shards = groups
    reduce_group = shards if _shared() else _second_group(shards, device)
    made = Groups(
        _C.Collectives(shards.group_name, device),
        _C.Collectives(reduce_group.group_name, device),
        _C.Collectives(replicas[0].group_name, device) if replicas else None,
        shards,
        reduce_group,
    )
    _known[names] = (groups, made)
    return made


_COMMUNICATORS = "LOWTIDE_COMMUNICATORS"


def _shared() -> bool:
    value = os.environ.get(_COMMUNICATORS, "separate")
    if value not in ("separate", "shared"):
        raise ValueError(
            f"lowtide: {_COMMUNICATORS}: expected separate or shared, got {value!r}. "
            "Unset it for a communicator of reductions beside that of gathers."
        )
    return value == "shared"


def _second_group(shards: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    made = dist.new_group(
        dist.get_process_group_ranks(shards),
        timeout=_timeout(shards, device),
        backend=dist.get_backend(shards),
        use_local_synchronization=True,
        group_desc="lowtide_reduce",
    )
    assert made is not None
    return made


def mesh_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Of every dimension: replicas, if there are any, then shards."""
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def smaller_group(mesh: DeviceMesh, size: int, device: torch.device) -> _C.Collectives:
    """Over runs of ``size`` ranks of shards: where parameters stay after forward.
    Collective over the mesh."""
    runs = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size))
    return _C.Collectives(runs.get_group(1).group_name, device)


def _timeout(
    group: dist.ProcessGroup, device: torch.device
) -> datetime.timedelta | None:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
