"""One ledger and one pool of bytes per device of this process; what of the host's is
page-locked for it."""

import functools
import os

import torch

from lowtide import _C
from lowtide._base import debugging, environment


@functools.cache
def ledger(device: torch.device) -> _C.Ledger:
    return _C.Ledger()


@functools.cache
def device_memory(device: torch.device) -> _C.DeviceMemory:
    memory = _C.DeviceMemory(device, ledger(device))
    memory.set_poison(debugging.enabled())
    return memory


def pinned_cap() -> int:
    """Bytes this process may page-lock: LOWTIDE_PINNED_BYTES, or its share of half
    the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = total // 2 // environment.number("LOCAL_WORLD_SIZE", 1, least=1)
    return environment.number("LOWTIDE_PINNED_BYTES", share)


@functools.cache
def offload_pool(device: torch.device) -> _C.PinnedPool:
    """What offloaded parameters and gradients are in; gradients' bytes are kept for
    the next step."""
    return _C.PinnedPool(
        device_memory(device),
        cap_bytes=pinned_cap(),
        holds="offloaded parameters and gradients",
    )


@functools.cache
def host_memory(device: torch.device, pinned: bool) -> _C.HostMemory:
    return _C.HostMemory(
        device_memory(device), pool=offload_pool(device), page_locked=pinned
    )
