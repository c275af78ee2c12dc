"""Reduced gradients that wait on the host until the norm of all is known."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from lowtide import _C
from lowtide._base.memory import device_memory, pinned_cap
from lowtide._sharding.local_parameter import rows_of
from lowtide._sharding.unit import UnitState


@functools.cache
def _host_pool(device: torch.device) -> _C.PinnedPool:
    return _C.PinnedPool(
        device_memory(device), cap_bytes=pinned_cap(), holds="parked gradients"
    )


@dataclass(frozen=True)
class _Gradient:
    parameter: Tensor
    block: int
    spec: DTensorSpec | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostBytes:
    """One unit's, page-locked beside a device, for every step again."""

    def __init__(self, unit: str, device: torch.device) -> None:
        self._unit = unit
        self._device = device
        self._blocks: list[Tensor] = []

    def block(self, number: int, num_bytes: int) -> Tensor:
        while len(self._blocks) <= number:
            self._blocks.append(torch.empty(0, dtype=torch.uint8))
        if self._blocks[number].numel() != num_bytes:
            self._blocks[number] = _host_pool(self._device).host_tensor(
                device_memory(self._device), self._unit, num_bytes
            )
        return self._blocks[number]


class Parked:
    """The gradients of some parameters, which have none from now on. Copies run on the
    current stream; what was allocated at once, as a unit's gradients are, is copied at
    once."""

    def __init__(
        self, parameters: list[Tensor], host: HostBytes, unit: UnitState
    ) -> None:
        self.unit = unit
        self._device = rows_of(parameters[0]).device
        self._gradients: list[_Gradient] = []
        self._blocks: list[Tensor] = []
        numbers: dict[int, int] = {}
        for p in parameters:
            assert p.grad is not None
            rows = rows_of(p.grad)
            storage = rows.untyped_storage()
            number = numbers.setdefault(storage._cdata, len(numbers))
            if number == len(self._blocks):
                there = torch.empty(0, dtype=torch.uint8, device=rows.device)
                there.set_(storage)
                block = host.block(number, there.numel())
                block.copy_(there, non_blocking=True)
                self._blocks.append(block)
            spec = p.grad._spec if isinstance(p.grad, DTensor) else None
            self._gradients.append(
                _Gradient(
                    p,
                    number,
                    spec,
                    rows.dtype,
                    rows.shape,
                    rows.stride(),
                    int(rows.storage_offset()),
                )
            )
        for p in parameters:
            p.grad = None

    def come_back(self) -> list[Tensor]:
        """The parameters, with their gradients. Stays as it is."""
        blocks = [
            torch.empty_like(block, device=self._device).copy_(block, non_blocking=True)
            for block in self._blocks
        ]
        for each in self._gradients:
            rows = torch.empty(0, dtype=each.dtype, device=self._device)
            rows.set_(
                blocks[each.block].untyped_storage(),
                each.offset,
                each.size,
                each.stride,
            )
            each.parameter.grad = (
                rows
                if each.spec is None
                else DTensor(rows, each.spec, requires_grad=False)
            )
        return [each.parameter for each in self._gradients]
