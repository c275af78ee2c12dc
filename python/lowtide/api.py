"""``fully_shard`` and what it turns modules into: FSDP2's names, keywords, defaults."""

from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

from lowtide._sharding import arguments
from lowtide._sharding import modules as managed
from lowtide._sharding.fsdp_module import (
    FSDPModule,
    become_fsdp_module,
    register_hooks,
)
from lowtide._sharding.late import watch
from lowtide._sharding.owners import owner_of
from lowtide._sharding.placements import PlacementFn, Where, by_mesh
from lowtide._sharding.root import before_first_forward
from lowtide._sharding.spmd_mesh import data_parallel_mesh
from lowtide._sharding.unit import UnitState, unit_state, units_of
from lowtide._torch_version import GradientReductionHandle
from lowtide.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GradientMode,
)

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "abort_step",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_DEFAULT_PRECISION = MixedPrecisionPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    grads: GradientMode = ...,
) -> "FSDPModule": ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    grads: GradientMode = ...,
) -> list["FSDPModule"]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_PRECISION,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    grads: GradientMode = "exact",
) -> Any:
    """Shards the parameters of ``module`` over ``mesh``, in place; drop-in for
    ``torch.distributed.fsdp.fully_shard``.

    One call makes one unit, or one for each mesh: the parameters of ``module`` (or of a
    list of modules that run together) that no earlier call manages are gathered, freed
    and reduced together. Call it bottom-up, ending with the root. Between steps
    parameters are ``DTensor`` with ``Shard(0)``; names, shapes and ``requires_grad``
    stay. A weight that modules of several units share stays one weight, gathered with
    the innermost unit around them. Parameters that are ``DTensor`` already (tensor
    parallel) are sharded as FSDP2 does.

    Args:
        module: A module with a ``forward``, or a list of them.
        mesh: 1-D mesh to shard over, by default all ranks; or 2-D (HSDP): replicas,
            then shards, ``(Replicate(), Shard(0))``.
        reshard_after_forward: Free the full parameters after forward and gather
            them again in backward. ``None``: yes, except for the root. An int, a
            factor of the number of shards: keep a part of them on every rank and
            gather from that many neighbours.
        shard_placement_fn: Which dimension of a parameter to shard; ``None`` is
            ``Shard(0)``, others must be a multiple of the number of shards. A
            :class:`ShardPlacementResult` names a mesh as well: parameters of one mesh
            are one unit, and the units of the call are gathered and freed together.
        mp_policy: Dtypes for compute, reduction, inputs and outputs; torch's own.
        ignored_params: Parameters to leave alone.
        dp_mesh_dims: ``mesh`` is the mesh that every parameter is ``DTensor`` on, whole
            over the dimensions that this names: those to shard over, several of which
            are flattened, and those of replicas; or of replicas alone. The modules
            compute with ``DTensor``.
        offload_policy: ``CPUOffloadPolicy(pin_memory=True)``: shards, ``.grad`` and so
            the optimizer's states are on the host. What a gather reads is copied to
            the device ahead of it, gradients are copied back when they have been
            reduced, and the host waits for the copies when the root's forward and when
            a backward is over. :func:`step_on_device` steps them on the device.
        grads: ``"exact"``: gradients have FSDP2's bits. ``"fused"``: the GEMM of an
            ``nn.Linear``'s weight gradient adds to the fp32 gradient that is reduced,
            without a gradient in the compute dtype, its rounding and its copy. Layers
            of Megatron and TransformerEngine that write to ``weight.main_grad`` find
            it there; a large embedding sums its rows in fp32. What is not eligible
            stays exact: :func:`memory_report` says which and why.

    Returns:
        The same module(s), now instances of :class:`FSDPModule`.

    Raises:
        NotImplementedError: For a setting lowtide does not support, naming it.
        ValueError: For a module or parameter that can not be sharded.
    """
    roots = arguments.modules_of(module, "fully_shard")
    arguments.check_settings(
        mesh,
        mp_policy,
        offload_policy,
        grads,
        "fully_shard",
        dp_mesh_dims=dp_mesh_dims,
        places=shard_placement_fn is not None,
    )
    mesh = mesh if mesh is not None else default_mesh()
    device = _device_of(mesh)
    modules = managed.managed_modules(roots)
    parameters = managed.managed_parameters(modules, ignored_params or set())
    managed.require_initialized(roots, parameters, "fully_shard")
    managed.require_device_type(parameters, mesh.device_type)
    of_call = Where(mesh)
    if dp_mesh_dims is not None:
        flat = data_parallel_mesh(mesh, dp_mesh_dims, device)
        of_call = Where(flat, (mesh, dp_mesh_dims))
    meshes = by_mesh(parameters, of_call, shard_placement_fn)
    reshard = [
        arguments.post_forward(reshard_after_forward, where) for where, _ in meshes
    ]
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    to_move = [] if offloads else [p for p in parameters if not owner_of(p.parameter)]
    managed.move_to_device(modules, to_move, device)

    first: UnitState | None = None
    for (where, some), after_forward in zip(meshes, reshard, strict=True):
        state = UnitState(
            roots,
            where.mesh,
            device,
            mp_policy,
            after_forward,
            grads,
            offload_policy,
            before_first_forward,
            first,
        )
        state.storage = where.storage
        state.shard(some)
        first = first or state
    assert first is not None
    for one in modules:
        # torch.compile then treats parameters as it does FSDP2's.
        one._is_fsdp_managed_module = True  # type: ignore[assignment]
        one._fsdp_use_orig_params = True  # type: ignore[assignment]
    first.ignored = {id(parameter) for parameter in ignored_params or ()}
    watch(first)
    register_hooks(first)
    for one in roots:
        become_fsdp_module(one)
    return module


# torch's composable APIs have such an attribute: what this call attached to a module,
# or None.
fully_shard.state = unit_state


def abort_step(model: nn.Module) -> None:
    """Returns every unit of ``model`` to a clean state after an exception: waits for
    what is in flight, frees gathered parameters and buffers, and drops all gradients
    accumulated since the last optimizer step. The next root forward does this by
    itself; call it to free the memory earlier. Does nothing before the first forward.
    """
    roots = {state.root for state in units_of(model.modules()) if state.root}
    for root in roots:
        root.abort()


def default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
