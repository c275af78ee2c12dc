"""The total norm of gradients, and their scaling, by two passes of one kernel each, on
the device or, of an offloaded model, on the host.

torch's own computes a norm of every gradient, then the norm of these; with sharded
gradients it sends a scalar for each. Here a rank's shards have one norm, and one scalar
is sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_elsewhere(gradient: Tensor) -> bool:
    """Whether it is offloaded: its ranks' communicator may take no bytes of a host."""
    sharded = isinstance(gradient, DTensor)
    return sharded and gradient.device_mesh.device_type != gradient.device.type


def fits(gradients: Sequence[Tensor]) -> bool:
    """Whether the kernels take them: one device, and either all whole, or all sharded
    or replicated alike over one mesh."""
    if not gradients:
        return False
    first = gradients[0]
    return all(
        g.dtype in DTYPES and g.device == first.device and _placed_alike(g, first)
        for g in gradients
    )


def _placed_alike(gradient: Tensor, first: Tensor) -> bool:
    if not isinstance(gradient, DTensor) or not isinstance(first, DTensor):
        return not isinstance(gradient, DTensor) and not isinstance(first, DTensor)
    return (
        gradient.device_mesh == first.device_mesh
        and _sharded_dims(gradient) == _sharded_dims(first)
        and all(type(p) in (Shard, Replicate) for p in gradient.placements)
    )


def _sharded_dims(gradient: DTensor) -> list[int]:
    """The dimensions of the mesh over which it is split, whatever its own."""
    placements = gradient.placements
    return [d for d, p in enumerate(placements) if isinstance(p, Shard)]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """float32: the L2 norm of all elements; replicated over the gradients' mesh.

    Collective if they are sharded: one all-reduce of a scalar along each dimension of
    the mesh.
    """
    norm: Tensor = torch.ops.lowtide.foreach_l2_norm(_locals(gradients))
    first = gradients[0]
    if not isinstance(first, DTensor):
        return norm
    # In step with the mesh's collectives, on its device.
    squares = norm.square().to(first.device_mesh.device_type)
    for dim in _sharded_dims(first):
        torch.distributed.all_reduce(squares, group=first.device_mesh.get_group(dim))
    replicated = [Replicate()] * first.device_mesh.ndim
    return DTensor.from_local(
        squares.sqrt(), first.device_mesh, replicated, run_check=False
    )


def scale_(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """What ``clip_grads_with_norm_`` does: times min(1, max_norm / (norm + 1e-6))."""
    whole = norm.to_local() if isinstance(norm, DTensor) else norm
    factor = torch.clamp(max_norm / (whole + 1e-6), max=1.0)
    locals_ = _locals(gradients)
    torch.ops.lowtide.foreach_scale_(locals_, factor.to(locals_[0].device))


def _locals(gradients: Sequence[Tensor]) -> list[Tensor]:
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
