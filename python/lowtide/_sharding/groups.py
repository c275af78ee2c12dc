"""The communicators of a mesh.

[Note: Two communicators]
Gathers and reduce-scatters have a communicator each, so that on NCCL they overlap; sums
over replicas have a third. There is one order over all of them, the same on every rank
whatever its data is ([Note: One order over all communicators] in gradient_stream.h), as
NVIDIA asks for: a kernel that waits for its peers keeps its place on the device. They
are made when the model is sharded, with one more for the gathers of backward where
parameters stay within fewer ranks (``reshard_after_forward=k``).

LOWTIDE_COMMUNICATORS=shared uses the mesh's own for both, which saves NCCL's buffers of
one; communication no longer overlaps (docs/design/cuda.md says when that costs time).

A fourth, of gloo, compares on the host what ranks did (step_log.h): one for all meshes
over the same ranks. A mesh of one rank beside larger ones, that of experts of which
each rank has others say, has one, too; a model on several meshes has one over all ranks
that these connect (connected.py). LOWTIDE_COMPARE_RANKS=off leaves them out, for
machines without gloo's network: ranks that run different units are then noticed in the
first forward only.
"""

import dataclasses
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowtide import _C
from lowtide._base.failures import name_failed_ranks
from lowtide._base.process_groups import new_group


@dataclasses.dataclass(frozen=True)
class Groups:
    gather: _C.Collectives
    reduce: _C.Collectives
    replicas: _C.Collectives | None
    host: _C.HostChannel | None  # over all ranks of the mesh
    # Over each run of so many ranks of shards, once asked for.
    runs: dict[int, _C.Collectives] = dataclasses.field(default_factory=dict)

    def are_of(self, groups: list[dist.ProcessGroup]) -> bool:
        """Whether the mesh has these: names come again after destroy_process_group."""
        mine = [self.gather] if self.replicas is None else [self.replicas, self.gather]
        return len(mine) == len(groups) and all(
            one.is_over(group) for one, group in zip(mine, groups, strict=True)
        )


# By the names of the mesh's groups, so every unit on a mesh shares them.
_known: dict[tuple[str, ...], Groups] = {}


def groups_of(mesh: DeviceMesh, device: torch.device) -> Groups:
    """The mesh's own group of shards for gathers, a second one over the same ranks for
    reduce-scatters, and its group of replicas if it has two dimensions. Collective
    over the mesh on first use."""
    groups = mesh_groups(mesh)
    names = tuple(group.group_name for group in groups)
    known = _known.get(names)
    if known is not None and known.are_of(groups):
        return known
    name_failed_ranks()
    *replicas, shards = groups
    reduce_group = shards
    if not one_communicator():
        ranks = dist.get_process_group_ranks(shards)
        reduce_group = _group_like(shards, ranks, device, "lowtide_reduce")
    for group in dict.fromkeys((*groups, reduce_group)):
        _connect(group, device)
    made = Groups(
        _C.Collectives(shards.group_name, device),
        _C.Collectives(reduce_group.group_name, device),
        _C.Collectives(replicas[0].group_name, device) if replicas else None,
        _host_channel_of(mesh, device),
    )
    _known[names] = made
    return made


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _host_channel_of(mesh: DeviceMesh, device: torch.device) -> _C.HostChannel | None:
    compares = compares_ranks()
    backend = dist.get_backend(mesh.get_group(mesh.ndim - 1))
    comparable = dist.is_gloo_available() and backend != "fake"
    if not compares or not comparable or dist.get_world_size() == 1:
        return None
    return host_channel(ranks_of(mesh), mesh, device)


_channels: dict[tuple[int, ...], _C.HostChannel] = {}  # by their ranks


def host_channel(
    ranks: tuple[int, ...], mesh: DeviceMesh, device: torch.device
) -> _C.HostChannel:
    """Over ``ranks``, in order, with the timeout of ``mesh``. Collective over them on
    first use."""
    known = _channels.get(ranks)
    if known is None or not _lives(known):
        group = _host_group(mesh, list(ranks), device)
        known = _channels[ranks] = _C.HostChannel(group.group_name)
    return known


def _lives(channel: _C.HostChannel) -> bool:
    """destroy_process_group may have ended its group."""
    try:
        return channel.process_group in dist.distributed_c10d._world.pg_map
    except RuntimeError:
        return False


_COMMUNICATORS = "LOWTIDE_COMMUNICATORS"


def one_communicator() -> bool:
    value = os.environ.get(_COMMUNICATORS, "separate")
    if value not in ("separate", "shared"):
        raise ValueError(
            f"lowtide: {_COMMUNICATORS}: expected separate or shared, got {value!r}. "
            "Unset it for a communicator of reductions beside that of gathers."
        )
    return value == "shared"


_COMPARE_RANKS = "LOWTIDE_COMPARE_RANKS"


def compares_ranks() -> bool:
    value = os.environ.get(_COMPARE_RANKS, "on")
    if value not in ("on", "off"):
        raise ValueError(
            f"lowtide: {_COMPARE_RANKS}: expected on or off, got {value!r}. Unset it "
            "to compare what ranks did in every step."
        )
    return value == "on"


def _host_group(
    mesh: DeviceMesh, ranks: list[int], device: torch.device
) -> dist.ProcessGroup:
    shards = mesh.get_group(mesh.ndim - 1)
    try:
        return new_group(
            ranks,
            "lowtide_compare",
            backend="gloo",
            timeout=_timeout(shards, device),
        )
    except RuntimeError as error:
        raise RuntimeError(
            "lowtide: comparing what ranks did: expected gloo to connect the ranks of "
            f"the mesh, got {str(error).splitlines()[0]!r}. Set GLOO_SOCKET_IFNAME to "
            f"an interface that reaches all machines, or {_COMPARE_RANKS}=off."
        ) from error


def group_of_one(like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Of this rank alone. No other rank takes part in making it."""
    return _group_like(like, [dist.get_rank()], device, "lowtide_alone")


def _group_like(
    like: dist.ProcessGroup, ranks: list[int], device: torch.device, name: str
) -> dist.ProcessGroup:
    """Another group with the backend, timeout and options of ``like``. Collective over
    ``ranks`` alone."""
    timeout = _timeout(like, device)
    return new_group(
        ranks,
        name,
        backend=_backend_name(like, device),
        timeout=timeout,
        options=_nccl_options(like, device, timeout),
    )


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of the device alone: one for the host beside it, as cpu:gloo,cuda:nccl asks for,
    would connect every pair of ranks for nothing."""
    whole = dist.Backend(dist.get_backend_config(group))
    names = dist.distributed_c10d.BackendConfig(whole).get_device_backend_map()
    return names.get(device.type, dist.get_backend(group))


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL's communicator is made now, when the model is sharded, and not by the first
    collective: a backward's is issued on autograd's thread, between other units'."""
    if device.type == "cuda":
        backend = _backend(group, device)
        # A group that knew its device from the start has one: this would be another.
        # That is of the backend, not of the version: only NCCL's tell.
        if hasattr(backend, "_comm_ptr") and not backend._comm_ptr():
            backend.eager_connect_single_device(device)


def _nccl_options(
    group: dist.ProcessGroup, device: torch.device, timeout: datetime.timedelta | None
) -> Any:
    """Options for another communicator like the group's; None if it is not NCCL's."""
    theirs = _options(group, device)
    if not dist.is_nccl_available() or not isinstance(
        theirs, dist.ProcessGroupNCCL.Options
    ):
        return None
    # These are new, since a copy would be a split of what the group is a split of.
    options = dist.ProcessGroupNCCL.Options()
    options.config = theirs.config
    options.is_high_priority_stream = theirs.is_high_priority_stream
    if timeout is not None:
        options._timeout = timeout
    return options


def mesh_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The group of every dimension: replicas, if there are any, then shards."""
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def smaller_group(mesh: DeviceMesh, size: int, device: torch.device) -> _C.Collectives:
    """A communicator over each run of ``size`` ranks of shards, where parameters stay
    after forward; one for all units on the mesh. Collective over the run on first
    use."""
    runs = groups_of(mesh, device).runs
    if size not in runs:
        shards = mesh_groups(mesh)[-1]
        begin = shards.rank() // size * size
        ranks = dist.get_process_group_ranks(shards)[begin : begin + size]
        group = _group_like(shards, ranks, device, "lowtide_part")
        _connect(group, device)
        runs[size] = _C.Collectives(group.group_name, device)
    return runs[size]


def _timeout(
    group: dist.ProcessGroup, device: torch.device
) -> datetime.timedelta | None:
    return getattr(_options(group, device), "_timeout", None)


def _options(group: dist.ProcessGroup, device: torch.device) -> Any:
    return getattr(_backend(group, device), "options", None)


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
    return getattr(backend, "wrapped_pg", backend)
