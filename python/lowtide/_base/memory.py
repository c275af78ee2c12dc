"""One ledger and one pool of bytes per device of this process."""

import functools

import torch

from lowtide import _C
from lowtide._base import debugging


@functools.cache
def ledger(device: torch.device) -> _C.Ledger:
    return _C.Ledger()


@functools.cache
def device_memory(device: torch.device) -> _C.DeviceMemory:
    memory = _C.DeviceMemory(device, ledger(device))
    memory.set_poison(debugging.enabled())
    return memory
