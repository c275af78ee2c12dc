"""Where a program of this folder runs: the simulated device, a GPU beside ranks that
are not there, or one rank alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

DEVICES = ("phantom", "cuda")


def start(device: str, world: int, *, expandable: bool = False) -> None:
    """Rank 0 of ``world`` ranks, of which it is the only one that runs. Call it before
    the first allocation."""
    if device == "phantom":
        import lowtide.phantom

        lowtide.phantom.install(mode="meta", expandable=expandable)
        lowtide.phantom.init_world(world)
        return
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    without_cudnn_attention()
    init_fake_group(world)


def start_one_rank(device: str = "cuda") -> None:
    """World 1 on NCCL, or on gloo for the CPU."""
    of: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        of = {"backend": "nccl", "device_id": torch.device("cuda", 0)}
        without_cudnn_attention()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **of)


def without_cudnn_attention() -> None:
    """It has a workspace that the simulated device does not know."""
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
