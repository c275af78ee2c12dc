"""Meshes of some of the ranks, made by those alone."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def strided_mesh(number: int, step: int = 1) -> DeviceMesh:
    """Of so many ranks, this one among them, of which each is that far from the
    next."""
    rank = dist.get_rank()
    first = rank // (number * step) * number * step + rank % step
    group = dist.new_group(
        [first + step * i for i in range(number)], use_local_synchronization=True
    )
    return DeviceMesh.from_group(group, "cpu")
