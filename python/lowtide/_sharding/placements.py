"""Over which mesh each parameter of a ``fully_shard`` call is split: the call's, or, as
in FSDP2 from torch 2.12 on, one of its own that ``shard_placement_fn`` returned."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lowtide._base.classes import class_name
from lowtide._sharding.modules import ManagedParameter
from lowtide._sharding.owners import owner_of
from lowtide._torch_version import ShardPlacementResult
from lowtide.policies import DataParallelMeshDims

PlacementFn: TypeAlias = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


@dataclasses.dataclass(frozen=True)
class Where:
    """Replicas, if there are any, then shards; of ``storage``, if that is the mesh that
    parameters are ``DTensor`` on already."""

    mesh: DeviceMesh
    storage: tuple[DeviceMesh, DataParallelMeshDims] | None = None

    def is_as(self, other: "Where") -> bool:
        return self.mesh == other.mesh and self.storage == other.storage


def by_mesh(
    parameters: list[ManagedParameter], of_call: Where, place: PlacementFn | None
) -> list[tuple[Where, list[ManagedParameter]]]:
    """The parameters of each mesh, in the order in which they are met, and how each is
    split, as ``place`` says. What an earlier call has sharded goes with the first."""
    found: list[tuple[Where, list[ManagedParameter]]] = []
    owned = []
    for item in parameters:
        if place is None or owner_of(item.parameter) is not None:
            owned.append(item)
            continue
        where, item.placement = _resolved(item, place(item.parameter), of_call)
        known = next((some for there, some in found if there.is_as(where)), None)
        if known is None:
            found.append((where, [item]))
        else:
            known.append(item)
    if not found:
        return [(of_call, owned)]
    found[0][1].extend(owned)
    return found


def _resolved(
    item: ManagedParameter, placed: Any, of_call: Where
) -> tuple[Where, Shard | None]:
    if not hasattr(placed, "mesh_info") or not hasattr(placed, "placement"):
        return of_call, placed
    module, name = item.slots[0]
    return _where(placed.mesh_info, of_call, f"{class_name(module)}.{name}"), (
        placed.placement
    )


def _where(info: Any, of_call: Where, who: str) -> Where:
    mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"lowtide: {who}: expected mesh_info to be torch's FSDPMeshInfo or "
            f"HSDPMeshInfo, or a DeviceMesh, got {info!r}. Pass "
            "lowtide.ShardPlacementResult(placement, mesh)."
        )
    dims = (None, 0) if mesh.ndim == 1 else (0, 1)
    if mesh is not info:
        dims_of_info = info.replicate_mesh_dim, info.shard_mesh_dim
    if mesh.ndim > 2 or (mesh is not info and dims_of_info != dims):
        raise NotImplementedError(
            f"lowtide: {who}: expected mesh_info of one dimension, of shards, or of "
            f"two, replicas and shards, got {info}. Pass a slice of the mesh: "
            "FSDPMeshInfo(mesh['shards'], shard_mesh_dim=0)."
        )
    if mesh.device_type != of_call.mesh.device_type:
        raise ValueError(
            f"lowtide: {who}: expected a mesh of {of_call.mesh.device_type}, where the "
            f"call's is, got one of {mesh.device_type}. Pass meshes of one device type."
        )
    spmd_dims = getattr(info, "dp_mesh_dims", None)
    return Where(mesh, (info.spmd_mesh, spmd_dims) if spmd_dims is not None else None)
