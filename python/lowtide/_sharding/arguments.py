"""What ``fully_shard`` and ``wrap`` accept, checked before anything is changed."""

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from lowtide._sharding import modules as managed
from lowtide._sharding.fsdp_module import is_of_torch
from lowtide._sharding.placements import Where
from lowtide._sharding.spmd_mesh import check_dims
from lowtide.policies import (
    DataParallelMeshDims,
    GradientMode,
)


def modules_of(module: Any, who: str) -> tuple[nn.Module, ...]:
    """The modules that a unit is made of, from a module or a list of modules, none of
    them sharded yet. A module that another of the list contains belongs to that one, as
    in FSDP2."""
    several = isinstance(module, Iterable) and not isinstance(module, str | nn.Module)
    roots = tuple(module) if several else (module,)
    if not roots:
        raise ValueError(
            f"lowtide: {who}: expected a module or a list of modules, got an "
            "empty list. Pass at least one module."
        )
    for root in roots:
        require_shardable(root, who)
    inside = {below for root in roots for below in list(root.modules())[1:]}
    return tuple(dict.fromkeys(root for root in roots if root not in inside))


def require_shardable(root: Any, who: str) -> None:
    name = _kind(root)
    if not isinstance(root, nn.Module):
        raise ValueError(
            f"lowtide: {who}: expected a module, got {name}. Pass the model, or a "
            "block of it."
        )
    if isinstance(root, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"lowtide: {who}: expected a module with a forward, got {name}. "
            "Call it on the modules inside."
        )
    if managed.is_unit(root):
        raise ValueError(
            f"lowtide: {who}: expected a module that is not sharded yet, got "
            f"{name}, which is. Call {who} once for each module."
        )
    for path, module in root.named_modules():
        if is_of_torch(module):
            if managed.is_replicated(module):
                if module is not root:
                    continue
                raise ValueError(
                    f"lowtide: {who}: expected a module that torch's replicate does "
                    f"not manage, got {name}. Shard what is around it, or parts of the "
                    "model beside it."
                )
            where = f" at {path!r}" if path else ""
            raise ValueError(
                f"lowtide: {who}: expected a module that torch's fully_shard has not "
                f"sharded, got {_kind(module)}{where}, which it has. Import every "
                "fully_shard of the script from lowtide."
            )


def check_settings(
    mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    grads: str,
    who: str,
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    places: bool = False,
) -> None:
    if grads not in get_args(GradientMode):
        raise ValueError(
            f"lowtide: {who}: expected grads to be 'exact' or 'fused', got "
            f"{grads!r}. Leave it out for FSDP2's gradients."
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        dtype = mp_policy if isinstance(mp_policy, torch.dtype) else torch.bfloat16
        raise ValueError(
            f"lowtide: {who}: expected mp_policy to be a MixedPrecisionPolicy, got "
            f"{_kind(mp_policy)}. Write lowtide.MixedPrecisionPolicy(param_dtype="
            f"{dtype}, reduce_dtype=torch.float32), say."
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"lowtide: {who}: expected mesh to be a DeviceMesh, got {_kind(mesh)}. Of "
            "a process group, torch.distributed.device_mesh.DeviceMesh.from_group("
            "group, 'cuda') makes one; leave it out for all ranks."
        )
    if dp_mesh_dims is not None:
        check_dims(mesh, dp_mesh_dims, places, who)
    elif mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(
            f"lowtide: {who}: expected a mesh of one dimension, or of replicas "
            f"and shards, got {mesh.ndim} dimensions ({mesh}). Pass a slice of it: "
            "mesh['name']."
        )
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise ValueError(
            f"lowtide: {who}: expected offload_policy to be a CPUOffloadPolicy or "
            f"None, got {_kind(offload_policy)}. Write lowtide.CPUOffloadPolicy(), or "
            "leave it out."
        )
    known = type(offload_policy) is OffloadPolicy or isinstance(
        offload_policy, CPUOffloadPolicy | None
    )
    if not known:
        raise NotImplementedError(
            f"lowtide: {who}: expected offload_policy to be a CPUOffloadPolicy or "
            f"None, got {offload_policy}. Leave it out: what else is to go elsewhere "
            "is not known."
        )


def post_forward(
    reshard_after_forward: bool | int | None, where: Where
) -> bool | int | None:
    """The setting as given, but an int only if it is a smaller group than all
    shards."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if where.storage is not None:
        raise NotImplementedError(
            "lowtide: fully_shard: expected reshard_after_forward to be a bool or None "
            f"beside dp_mesh_dims, got {reshard_after_forward}. Pass True."
        )
    size = where.mesh.size(where.mesh.ndim - 1)
    if not isinstance(reshard_after_forward, int):
        raise ValueError(
            "lowtide: fully_shard: expected reshard_after_forward to be a bool or "
            f"None, got {reshard_after_forward!r}. Pass True, False or None."
        )
    if reshard_after_forward < 1 or size % reshard_after_forward != 0:
        raise ValueError(
            "lowtide: fully_shard: expected reshard_after_forward to be a bool or a "
            f"factor of the {size} shards, got {reshard_after_forward}. Pass the ranks "
            "of a node, say, or True."
        )
    if reshard_after_forward in (1, size):
        return reshard_after_forward == size
    return reshard_after_forward


def _kind(value: Any) -> str:
    if value is None or isinstance(value, str | torch.dtype):
        return repr(value)
    return type(value).__name__
