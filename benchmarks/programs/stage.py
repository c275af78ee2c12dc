"""Where a program of this folder runs: the simulated device, or a GPU beside a process
group that does nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

DEVICES = ("phantom", "cuda")


def start(device: str, world: int, *, expandable: bool = False) -> None:
    """Rank 0 of ``world`` ranks whose collectives move nothing. Call it before the
    first allocation."""
    if device == "phantom":
        import lowtide.phantom

        lowtide.phantom.install(mode="meta", expandable=expandable)
        lowtide.phantom.init_world(world)
        return
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    without_cudnn_attention()
    init_fake_group(world)


def without_cudnn_attention() -> None:
    """It has a workspace that the simulated device does not know."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def init_fake_group(world: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def peaks() -> dict[str, Any]:
    """Bytes since the peaks were last reset."""
    accelerator = torch.accelerator
    return {
        "allocated": accelerator.max_memory_allocated(),
        "reserved": accelerator.max_memory_reserved(),
    }
