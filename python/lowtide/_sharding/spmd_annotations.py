"""Parameters that the `spmd_types` package knows the types of, FSDP2's rules of torch
2.15: plain tensors in a module's computation, stored as ``DTensor`` on the mesh of
``dp_mesh_dims``."""

import dataclasses
import sys
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement

from lowtide._sharding.spmd_mesh import data_parallel_places
from lowtide._torch_version import STORES_ANNOTATED
from lowtide.policies import DataParallelMeshDims


@dataclasses.dataclass(frozen=True)
class Annotations:
    """Of one parameter, translated to the dimensions of the mesh it is stored on."""

    gradients: tuple[Placement, ...]  # what backward computes, by dimension
    types: dict[Any, Any]  # by axis of the mesh of the computation
    partition: Any  # a spmd_types.PartitionSpec, or None

    def sums(self, data_parallel: frozenset[int]) -> bool:
        """Whether gradients are parts of a sum along dimensions that are none of
        ``data_parallel``, the unit's own."""
        return any(
            isinstance(each, Partial)
            for place, each in enumerate(self.gradients)
            if place not in data_parallel
        )

    def restore(self, full: Tensor) -> None:
        """What is computed with has the types that the parameter had."""
        sys.modules["spmd_types"].assert_type(
            full, self.types, partition_spec=self.partition
        )


def as_stored(
    parameter: nn.Parameter,
    storage: tuple[DeviceMesh, DataParallelMeshDims] | None,
    who: str,
) -> tuple[nn.Parameter, Annotations | None]:
    """``parameter`` as a ``DTensor`` over its own memory, if it has types and is none.
    Raises ValueError where these do not say how it lies on the mesh of ``storage``."""
    spmd: Any = sys.modules.get("spmd_types")
    if spmd is None or isinstance(parameter, DTensor):
        return parameter, None
    given = spmd.get_local_type(parameter)
    if not given:
        return parameter, None
    if storage is None:
        if not STORES_ANNOTATED:
            return parameter, None
        raise ValueError(
            f"lowtide: {who}: expected dp_mesh_dims beside types of spmd_types, which "
            f"it has along {_names(given)}, got none. Pass the mesh of all its "
            "dimensions and dp_mesh_dims."
        )
    mesh, dims = storage
    assert mesh.mesh_dim_names is not None
    stored_along = [spmd.MeshAxis.of(mesh.get_group(n)) for n in mesh.mesh_dim_names]
    partition = spmd.runtime.get_partition_spec(parameter)
    types = dict(given)
    if partition is not None:
        types |= spmd.types.partition_spec_to_shard_types(partition)
    computed_along = _computed_along(spmd, types, stored_along, who)
    own = data_parallel_places(mesh, dims)
    units = _flatten(spmd, [stored_along[place] for place in sorted(own)])
    found: dict[Any, Any] = {stored_along[place]: spmd.R for place in own}
    for axis, type_ in types.items():
        if axis <= units:
            if type_ is not spmd.R:
                raise ValueError(
                    f"lowtide: {who}: expected type R along the data-parallel {axis}, "
                    f"where fully_shard sums the gradients, got {type_}. Annotate it "
                    "with R there."
                )
        else:
            found[axis] = type_
    if set(found) != set(stored_along):
        raise ValueError(
            f"lowtide: {who}: expected a type along each dimension of the mesh that is "
            f"not data-parallel, {_names(stored_along)}, got types along "
            f"{_names(types)}. Annotate it on that mesh."
        )
    ordered = [found[axis] for axis in stored_along]
    place = spmd.spmd_type_to_dtensor_placement
    stored = DTensor.from_local(
        parameter.data, mesh, [place(each) for each in ordered], run_check=False
    )
    return nn.Parameter(stored, requires_grad=parameter.requires_grad), Annotations(
        tuple(place(each.backward_type()) for each in ordered),
        {axis: given.get(axis, spmd.R) for axis in computed_along},
        partition,
    )


def _computed_along(
    spmd: Any, types: dict[Any, Any], stored_along: list[Any], who: str
) -> tuple[Any, ...]:
    """The axes of the mesh that modules compute on: the annotated ones if these are
    all of it, or those of the current mesh."""
    if _same_ranks(spmd, types, stored_along):
        return tuple(types)
    current = spmd.current_mesh()
    axes = tuple(current or ())
    if not axes or not _same_ranks(spmd, axes, stored_along):
        raise ValueError(
            f"lowtide: {who}: expected types along a mesh with the ranks of the one "
            f"that fully_shard was given, {_names(stored_along)}, got types along "
            f"{_names(types)}. Annotate it along all of the mesh, or call fully_shard "
            "within spmd_types.set_current_mesh."
        )
    if unknown := [axis for axis in types if axis not in axes]:
        raise ValueError(
            f"lowtide: {who}: expected types along the current mesh, {_names(axes)}, "
            f"got ones along {_names(unknown)}. Annotate it along that mesh alone."
        )
    return axes


def _same_ranks(spmd: Any, one: Any, other: Any) -> bool:
    ours, theirs = (spmd.normalize_mesh(frozenset(axes)) for axes in (one, other))
    if not ours or not theirs:
        return bool(ours == theirs)
    return bool(_flatten(spmd, ours) == _flatten(spmd, theirs))


def _flatten(spmd: Any, axes: Any) -> Any:
    return spmd._mesh_axis.flatten_axes(tuple(axes))


def _names(axes: Any) -> str:
    return ", ".join(map(str, axes))
