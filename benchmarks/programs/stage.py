"""Where a program of this folder runs: over the dry driver as one rank of a world, on a
GPU beside ranks that are not there, as one rank alone, or as one of several that share
a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def start(world: int, *, expandable: bool = False) -> None:
    """Rank 0 of ``world`` ranks, of which it is the only one that runs: on NCCL in
    torchrun's environment, as over the dry driver, else on torch's fake group. Call it
    before the first allocation."""
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if "WORLD_SIZE" in os.environ:
        here = torch.device("cuda", 0)
        dist.init_process_group("nccl", rank=0, world_size=world, device_id=here)
    else:
        init_fake_group(world)


def start_real_ranks(device: str = "cuda") -> None:
    """On NCCL, or on gloo for the CPU: the ranks of torchrun's environment, all on the
    first GPU, or world 1."""
    of: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        of = {"backend": "nccl", "device_id": torch.device("cuda", 0)}
        without_cudnn_attention()
    if "WORLD_SIZE" not in os.environ:
        of |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**of)


def without_cudnn_attention() -> None:
    """Of its gradients the bits may differ from run to run."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def init_fake_group(world: int) -> None:
    """Nothing travels: a gather copies its input to every rank's place, and a
    reduce-scatter leaves its output as it was."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def peaks() -> dict[str, Any]:
    """Bytes since the peaks were last reset."""
    accelerator = torch.accelerator
    return {
        "allocated": accelerator.max_memory_allocated(),
        "reserved": accelerator.max_memory_reserved(),
    }
