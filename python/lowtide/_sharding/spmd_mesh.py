"""Sharding over some dimensions of the mesh that the parameters are ``DTensor`` on
already: ``fully_shard(..., dp_mesh_dims=...)``, FSDP2's rules of torch 2.12."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lowtide._sharding.groups import group_of_one
from lowtide.policies import DataParallelMeshDims

# The attribute of a mesh that keeps its `_replicas_alone`, by the dimensions' names.
_REPLICAS_ALONE = "_lowtide_replicas_alone"


def check_dims(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims, places: bool, who: str
) -> None:
    """Raises unless ``mesh`` has the dimensions that ``dims`` names, and one to split
    over where a ``shard_placement_fn`` ``places`` parameters."""
    names = mesh.mesh_dim_names if mesh is not None else None
    if names is None:
        raise ValueError(
            f"lowtide: {who}: expected a mesh whose dimensions have names beside "
            "dp_mesh_dims, got one without. Pass mesh_dim_names to init_device_mesh."
        )
    wanted = (*dims.shard_names, *dims.replicate_names)
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(
            f"lowtide: {who}: expected dp_mesh_dims to name dimensions of the mesh, "
            f"{', '.join(names)}, got {', '.join(unknown)}. Name the mesh's own."
        )
    if places and not dims.shard_names:
        raise ValueError(
            f"lowtide: {who}: expected dp_mesh_dims with a dimension to shard over "
            "beside shard_placement_fn, got replicas alone. Leave it out: nothing is "
            "split."
        )


def data_parallel_mesh(
    mesh: DeviceMesh, dims: DataParallelMeshDims, device: torch.device
) -> DeviceMesh:
    """The dimensions that ``dims`` names, each kind flattened to one: shards, or
    replicas and shards; of replicas alone each has the only shard."""
    if not dims.shard_names:
        return _replicas_alone(mesh, dims.replicate_names, device)
    shards = _flat(mesh, dims.shard_names)
    if not dims.replicate_names:
        return shards
    return DeviceMesh._concatenate([_flat(mesh, dims.replicate_names), shards])


def _replicas_alone(
    mesh: DeviceMesh, names: tuple[str, ...], device: torch.device
) -> DeviceMesh:
    """These dimensions, flattened, and one of a single rank: the same for every unit
    over ``mesh``. That one has the place of the mesh's shards in groups and layouts
    alone: no parameter's ``DTensor`` is on it."""
    made: dict[tuple[str, ...], DeviceMesh]
    made = vars(mesh).setdefault(_REPLICAS_ALONE, {})
    if names not in made:
        group = _flat(mesh, names).get_group()
        made[names] = DeviceMesh.from_group(
            [group, group_of_one(group, device)],
            mesh.device_type,
            torch.tensor(dist.get_process_group_ranks(group)).view(-1, 1),
            mesh_dim_names=("replicas", "shard"),
        )
    return made[names]


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def places_of(mesh: DeviceMesh, names: Iterable[str]) -> frozenset[int]:
    """Of the dimensions with these names."""
    known = mesh.mesh_dim_names
    assert known is not None
    return frozenset(known.index(name) for name in names)


def data_parallel_places(
    mesh: DeviceMesh, dims: DataParallelMeshDims
) -> frozenset[int]:
    return places_of(mesh, (*dims.shard_names, *dims.replicate_names))


def check_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, dims: DataParallelMeshDims, who: str
) -> None:
    """Raises unless it is a whole one on every data-parallel rank."""
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"lowtide: {who}: expected a DTensor on the mesh of dp_mesh_dims, got a "
            f"{type(parameter).__name__}. Distribute it (distribute_module), or leave "
            "dp_mesh_dims out."
        )
    if parameter.device_mesh != mesh:
        raise ValueError(
            f"lowtide: {who}: expected a DTensor on the mesh that fully_shard was "
            f"given, {mesh}, got one on {parameter.device_mesh}. Pass the same mesh."
        )
    for place in sorted(data_parallel_places(mesh, dims)):
        if not isinstance(parameter.placements[place], Replicate):
            assert mesh.mesh_dim_names is not None
            raise ValueError(
                f"lowtide: {who}: expected Replicate() on the data-parallel dimension "
                f"{mesh.mesh_dim_names[place]!r}, got {parameter.placements[place]}. "
                "Distribute it with Replicate() there."
            )


def sharded_spec(
    whole: DTensorSpec,
    shards: DeviceMesh,
    dims: DataParallelMeshDims,
    placement: Shard,
) -> DTensorSpec:
    """Of a parameter ``whole`` that is split over ``shards``, which
    `data_parallel_mesh` made of its mesh: on that mesh itself, unless several
    dimensions are flattened. Of replicas alone each has all of it."""
    mesh = whole.mesh
    split_over = places_of(mesh, dims.shard_names)
    placements: list[Placement] = list(whole.placements)
    for place in split_over:
        splits = 1
        for later in range(place + 1, mesh.ndim):
            other = whole.placements[later]
            if isinstance(other, Shard | _StridedShard) and other.dim == placement.dim:
                splits *= mesh.size(later)
        placements[place] = (
            _StridedShard(placement.dim, split_factor=splits)
            if splits > 1
            else placement
        )
    if len(split_over) <= 1:
        return DTensorSpec(mesh, tuple(placements), tensor_meta=whole.tensor_meta)
    # FSDP2's order: where the first of them stands, replicas before shards.
    first = min(split_over)
    replicas = places_of(mesh, dims.replicate_names)
    parts, chosen = [], list[Placement]()
    assert mesh.mesh_dim_names is not None
    for place, name in enumerate(mesh.mesh_dim_names):
        if place == first:
            parts.append(shards)
            chosen += [*([Replicate()] if replicas else []), placements[place]]
        elif place not in split_over | replicas:
            parts.append(mesh[name])
            chosen.append(placements[place])
    mesh = DeviceMesh._concatenate(parts)
    return DTensorSpec(mesh, tuple(chosen), tensor_meta=whole.tensor_meta)
