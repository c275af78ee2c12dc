"""Whether ranks have one norm of gradients that are sharded over several meshes."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial


def require_common(total: Tensor, meshes: Iterable[DeviceMesh], who: str) -> None:
    """Raises ValueError on every rank of a mesh of ``meshes`` whose ranks differ in
    ``total``: each would scale its part of a gradient by another number. Where meshes
    do not have the same ranks it asks them, which waits for the device."""
    distinct = list(dict.fromkeys(meshes))
    if len({tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in distinct}) < 2:
        return
    for mesh in distinct:
        both = torch.stack((total, -total)).to(mesh.device_type)
        among = DTensor.from_local(
            both, mesh, [Partial("max")] * mesh.ndim, run_check=False
        )
        greatest, least = among.full_tensor().tolist()
        if greatest > -least:
            raise ValueError(
                f"lowtide: {who}: expected one norm of all gradients on the ranks of "
                f"{mesh}, got norms from {-least} to {greatest}: some gradients are "
                "other ranks' alone. Make parameters of which other ranks hold other "
                "parts, as of experts, DTensor over those ranks before fully_shard."
            )
