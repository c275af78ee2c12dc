"""One parameter in its two forms: the shard between steps, the full one in use."""

import dataclasses
import functools
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lowtide._sharding.full_hooks import PostAccumulateHooks
from lowtide._sharding.spmd_annotations import Annotations, as_stored
from lowtide._sharding.spmd_mesh import (
    check_parameter,
    data_parallel_places,
    sharded_spec,
)
from lowtide._sharding.subclass import (
    extended_class,
    plain_gradient,
    require_both_hooks,
    shard_of_subclass,
)
from lowtide._torch_version import (
    OWN,
    GradDtype,
    chosen_grad_dtype,
    gradient_as_computed,
    set_gradient_dtype,
)
from lowtide.policies import DataParallelMeshDims, ParameterDtypes

# Bytes of padding of one parameter that a gather may move unmentioned.
MUCH_PADDING = 64 << 20


@dataclasses.dataclass(eq=False)
class UnitParameter:
    slots: list[tuple[nn.Module, str]]
    spec: DTensorSpec
    shard: nn.Parameter  # a DTensor, registered between steps
    name: str  # "Linear.weight", the fully qualified name once there is a root
    shard_dim: int
    sizes: torch.Size  # of the full parameter; of this rank's part if it is parallel
    # Of a parameter that was a DTensor already, or whose gradients are to be summed
    # along other dimensions than the unit's.
    parallel: DTensorSpec | None
    data_parallel: frozenset[int]  # dimensions of `parallel` that are the unit's
    annotations: Annotations | None  # of spmd_types: a plain tensor in computations
    compute_dtype: torch.dtype | None  # that its policy has for it alone
    grad_dtype: GradDtype  # that the program has set
    # Of its gradient: on the wire, as it arrives there, and as `.grad`.
    reduce_dtype: torch.dtype = torch.float32
    arriving_dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype = torch.float32
    any_gradient: bool = False  # its `grad_dtype` is None, and there is no reduce_dtype
    # The class of a shard that says what is gathered for it, see subclass.py.
    extended_class: type[torch.Tensor] | None = None
    # Registered while the unit is unsharded; printing it without bytes would crash.
    full: nn.Parameter | None = dataclasses.field(default=None, repr=False)

    @property
    def registered(self) -> nn.Parameter:
        module, name = self.slots[0]
        parameter = module._parameters.get(name)
        if parameter is None:
            raise ValueError(
                f"lowtide: {self.name}: expected the parameter that fully_shard left "
                "there, got none. Remove a parameter before fully_shard."
            )
        return parameter

    def tie(self, slots: list[tuple[nn.Module, str]]) -> None:
        """Other modules share it; the first forward decides which unit gathers it."""
        for module, name in slots:
            module._parameters[name] = self.shard
        self.slots.extend(slots)

    def tie_again(self) -> None:
        """A state dict that was loaded by assignment has a tensor for every module
        that shares the weight. Of equal values they are one parameter again, as with
        FSDP2; others are left to the next forward, which names them."""
        mine = self.shard._local_tensor
        for module, name in self.slots[1:]:
            other = module._parameters.get(name)
            if other is self.shard or not isinstance(other, DTensor) or mine.is_meta:
                continue
            its = other._local_tensor
            alike = (mine.device, mine.dtype) == (its.device, its.dtype)
            if alike and torch.equal(mine, its):
                module._parameters[name] = self.shard

    def register(self, parameter: nn.Parameter) -> None:
        for module, name in self.slots:
            module._parameters[name] = parameter

    @property
    def extended(self) -> bool:
        return self.extended_class is not None

    @property
    def may_stream_rows(self) -> bool:
        """A row of it is a row of one rank's shard, registered in one place."""
        alone = self.parallel is None and not self.extended and len(self.slots) == 1
        return alone and self.shard_dim == 0

    def make_full(self, data: torch.Tensor) -> None:
        """``data``: what the unit gathers into."""
        # The first Python wrapper of a storage holds a reference to it for good; made
        # later, in a forward, it would look like a saved view ([Note: Saved
        # parameters] in shard/parameters/parameter_leaves.h).
        data.untyped_storage()
        self.full = self.full_over(data)

    def full_over(self, data: torch.Tensor) -> nn.Parameter:
        """The full parameter with this memory."""
        if self.parallel is not None and self.annotations is None:
            data = over_parallel(data, self.parallel)
        full = nn.Parameter(data, requires_grad=self.shard.requires_grad)
        full._post_accumulate_grad_hooks = PostAccumulateHooks(self)
        if self.annotations is not None:
            self.annotations.restore(full)
        set_gradient_dtype(
            full,
            self.arriving_dtype,
            as_computed=self.any_gradient or self.gradient_as_computed(full.dtype),
            chosen=self.grad_dtype != OWN,
        )
        if self.any_gradient:
            full.requires_grad_(True)  # for a frozen one, too: it may be trained later
            full.register_hook(functools.partial(_as_computed, weakref.ref(self)))
            full.requires_grad_(self.shard.requires_grad)
        return full

    def take_dtypes(self, dtypes: ParameterDtypes) -> None:
        self.reduce_dtype = dtypes.reduce
        self.arriving_dtype = dtypes.arriving
        self.gradient_dtype = dtypes.gradient
        self.any_gradient = dtypes.any_gradient

    def follow_grad_dtype(self, shard: nn.Parameter) -> None:
        """What is set for ``shard``, which has taken the place of this one's, or stays
        as it was: conversions and loads make parameters without."""
        chosen = chosen_grad_dtype(shard)
        if chosen != OWN:
            self.grad_dtype = chosen
        elif self.grad_dtype != OWN:
            shard.grad_dtype = self.grad_dtype

    @property
    def gradient_spec(self) -> DTensorSpec:
        """Of `.grad`."""
        meta = self.spec.tensor_meta
        if meta is None or meta.dtype == self.gradient_dtype:
            return self.spec
        meta = TensorMeta(meta.shape, meta.stride, self.gradient_dtype)
        return DTensorSpec(self.spec.mesh, self.spec.placements, tensor_meta=meta)

    def gradient_as_computed(self, compute: torch.dtype) -> bool:
        """Parallel ranks that hold all of it add their gradients before."""
        placements = self.parallel.placements if self.parallel else ()
        added = (
            any(
                isinstance(each, Replicate)
                for place, each in enumerate(placements)
                if place not in self.data_parallel
            )
            if self.annotations is None
            else self.annotations.sums(self.data_parallel)
        )
        return gradient_as_computed(compute, self.arriving_dtype, summed_before=added)


def _as_computed(
    owner: "weakref.ref[UnitParameter]", gradient: torch.Tensor | None
) -> None:
    """What a unit's buffers were laid out for before any gradient was there; None:
    it leaves in rows.

    Raises:
        NotImplementedError: For a gradient of another dtype, as a function of the
            program's own may return.
    """
    parameter = owner()
    assert parameter is not None
    if gradient is not None and gradient.dtype != parameter.arriving_dtype:
        raise NotImplementedError(
            f"lowtide: {parameter.name}: expected gradients in the dtype it is "
            f"computed with, {parameter.arriving_dtype}, as its grad_dtype is None and "
            f"the policy has no reduce_dtype, got {gradient.dtype}. Set its grad_dtype "
            f"to {gradient.dtype} before the first forward."
        )


def over_parallel(data: torch.Tensor, parallel: DTensorSpec) -> DTensor:
    """This rank's part of a full parameter that was a DTensor of ``parallel``."""
    meta = parallel.tensor_meta
    assert meta is not None
    spec = DTensorSpec(
        parallel.mesh,
        parallel.placements,
        tensor_meta=TensorMeta(meta.shape, meta.stride, data.dtype),
    )
    return DTensor(data, spec, requires_grad=False)


def require_sharded(registered: nn.Parameter, parameter: UnitParameter) -> None:
    """Raises unless what has taken the place of ``parameter``'s shard is a DTensor."""
    if not isinstance(registered, DTensor):
        raise ValueError(
            f"lowtide: {parameter.name}: expected a DTensor in place of the one that "
            f"fully_shard left there, got a {type(registered).__name__} of shape "
            f"{tuple(registered.shape)}. Replace a parameter before fully_shard; to "
            "change its values, load a state dict or write to the DTensor in place."
        )


def local_gradient(
    parallel: list[DTensorSpec | None],
    data_parallel: list[frozenset[int]],
    annotations: list[Annotations | None],
    i: int,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """This rank's part of what autograd computed for the ``i``-th parameter, which
    was a DTensor of ``parallel[i]``, or has ``annotations[i]``; plain, if that is a
    subclass. Over the dimensions ``data_parallel[i]`` of its mesh the unit sums."""
    if isinstance(gradient, AsyncCollectiveTensor):
        gradient = gradient.wait()
    spec, annotated = parallel[i], annotations[i]
    if spec is not None and annotated is not None:
        gradient = DTensor.from_local(
            gradient, spec.mesh, annotated.gradients, run_check=False
        )
    if isinstance(gradient, DTensor):
        assert spec is not None
        placements = [
            gradient.placements[place] if place in data_parallel[i] else placement
            for place, placement in enumerate(spec.placements)
        ]
        gradient = gradient.redistribute(placements=placements)._local_tensor
    if isinstance(gradient, AsyncCollectiveTensor):
        gradient = gradient.wait()
    return plain_gradient(gradient)


def make_shard(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placement: Shard | None,
    who: str,
    home: torch.device,
    storage: tuple[DeviceMesh, DataParallelMeshDims] | None = None,
) -> dict[str, Any]:
    """The fields of a UnitParameter that say how ``parameter`` is split over the last
    dimension of ``mesh``, which is part of the mesh of ``storage`` if there is one; the
    shard is on ``home``."""
    grad_dtype = chosen_grad_dtype(parameter)
    parameter, annotations = as_stored(parameter, storage, who)
    if storage is not None:
        check_parameter(parameter, *storage, who)
    data_parallel = data_parallel_places(*storage) if storage else frozenset[int]()
    placement = _checked(parameter, placement, who)
    parallel = parameter._spec if isinstance(parameter, DTensor) else None
    data = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    shards = mesh.ndim - 1  # a flattened mesh takes no negative dimension
    size, rank = mesh.size(shards), mesh.get_local_rank(shards)
    if placement.dim > 0 and data.shape[placement.dim] % size != 0:
        raise NotImplementedError(
            f"lowtide: {who}: expected dimension {placement.dim}, which is to be "
            f"split, to be a multiple of {size}, got "
            f"{data.shape[placement.dim]}. Return Shard(0) for it from "
            "shard_placement_fn: only dim 0 may be uneven."
        )
    if rank == 0:
        _warn_of_padding(data, placement.dim, size, who)
    extended = extended_class(data)
    if extended is not None:
        require_both_hooks(data, who)
        local = shard_of_subclass(data, size, rank, placement.dim, who)
    else:
        chunks = data.detach().chunk(size, placement.dim)
        local = (
            chunks[rank].clone(memory_format=torch.contiguous_format)
            if rank < len(chunks)
            else data.new_empty((0, *data.shape[1:]))
        )
    if local.device != home and not local.is_meta:
        local = local.to(home)
    spec = (
        _spec(parameter, mesh, placement, parallel)
        if storage is None or parallel is None
        else sharded_spec(parallel, mesh, storage[1], placement)
    )
    shard = nn.Parameter(
        DTensor(local, spec, requires_grad=False),
        requires_grad=parameter.requires_grad,
    )
    if grad_dtype != OWN:
        shard.grad_dtype = grad_dtype
    return {
        "grad_dtype": grad_dtype,
        "spec": spec,
        "shard": shard,
        "shard_dim": placement.dim,
        "sizes": data.shape,
        "parallel": (
            None if annotations and not annotations.sums(data_parallel) else parallel
        ),
        "data_parallel": data_parallel,
        "annotations": annotations,
        "extended_class": extended,
    }


def _warn_of_padding(data: torch.Tensor, dim: int, ranks: int, who: str) -> None:
    """Few experts among many ranks, above all: rows are padded to one a rank."""
    rows = data.shape[dim]
    padded = -(-rows // ranks) * ranks
    padding = (padded - rows) * (data.nbytes // max(rows, 1))
    if padding < max(data.nbytes, MUCH_PADDING):
        return
    even = [i for i in range(data.ndim) if data.shape[i] % ranks == 0]
    instead = "a mesh of fewer ranks"
    if even:
        instead = f"a shard_placement_fn that returns Shard({even[0]}) for it"
    warnings.warn(
        f"lowtide: {who}: expected at least as many rows as ranks, got "
        f"{tuple(data.shape)} split along dimension {dim} over {ranks} ranks: every "
        f"gather and reduction moves {padded / rows:.3g} times its bytes, as with "
        f"FSDP2. Pass {instead}.",
        stacklevel=2,
    )


def _checked(parameter: nn.Parameter, placement: Shard | None, who: str) -> Shard:
    if placement is None:
        return Shard(0)
    if type(placement) is not Shard:
        raise ValueError(
            f"lowtide: {who}: expected shard_placement_fn to return Shard or None, got "
            f"{placement!r}. Return Shard(0) for the default, "
            "lowtide.ShardPlacementResult(Shard(0), mesh) for a mesh of its own."
        )
    dim = placement.dim + (parameter.ndim if placement.dim < 0 else 0)
    if not 0 <= dim < parameter.ndim:
        raise ValueError(
            f"lowtide: {who}: expected shard_placement_fn to return a dimension of a "
            f"parameter with {parameter.ndim}, got {placement.dim}. Return Shard(0) "
            "for the default."
        )
    return Shard(dim)


def _spec(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placement: Shard,
    parallel: DTensorSpec | None,
) -> DTensorSpec:
    replicas: tuple[Placement, ...] = (Replicate(),) * (mesh.ndim - 1)
    if parallel is None:
        meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
        return DTensorSpec(mesh, (*replicas, placement), tensor_meta=meta)
    splits = parallel.num_shards_map[placement.dim]
    split: Placement = (
        _StridedShard(placement.dim, split_factor=splits) if splits > 1 else placement
    )
    return DTensorSpec(
        DeviceMesh._concatenate([mesh, parallel.mesh]),
        (*replicas, split, *parallel.placements),
        tensor_meta=parallel.tensor_meta,
    )
