"""Whether ranks have one norm of gradients that are sharded over several meshes, or
that are not sharded."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial


def require_common(
    total: Tensor, meshes: Iterable[DeviceMesh], who: str, *, beside_whole: bool = False
) -> None:
    """Raises ValueError on every rank of a mesh of ``meshes`` whose ranks differ in
    ``total``: each would scale its part of a gradient by another number. Where meshes
    do not have the same ranks, or ``total`` is of gradients that are not sharded, too
    (``beside_whole``), it asks them, which waits for the device."""
    distinct = list(dict.fromkeys(meshes))
    several = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in distinct}
    if len(several) < 2 and not beside_whole:
        return
    # Of NaN and another number a collective has no greatest.
    known = torch.nan_to_num(total, nan=math.inf, posinf=math.inf)
    spans = []
    for mesh in distinct:
        both = torch.stack((known, -known)).to(mesh.device_type)
        among = DTensor.from_local(
            both, mesh, [Partial("max")] * mesh.ndim, run_check=False
        )
        spans.append((mesh, among.full_tensor()))
    # Behind all collectives: in one a rank may be among others than the next's.
    for mesh, span in spans:
        greatest, least = span.tolist()
        if greatest > -least:
            raise ValueError(
                f"lowtide: {who}: expected one norm of all gradients on the ranks of "
                f"{mesh}, got norms from {-least} to {greatest}: some gradients are "
                "other ranks' alone. Make parameters of which other ranks hold other "
                "parts, as of experts, DTensor over those ranks before fully_shard; "
                "average gradients of parameters that are not sharded."
            )
