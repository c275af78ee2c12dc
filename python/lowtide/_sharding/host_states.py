"""States of an optimizer in page-locked host memory.

[Note: States on the host]
A unit's states are one block of host memory, which is copied as one for the unit's step
(see [Note: Steps of what is on the host]). A state that the step has made, or that
somebody has set, is elsewhere: it goes into its unit's block behind the step.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide import _C
from lowtide._base.memory import device_memory, pinned_cap
from lowtide._sharding.local_parameter import as_sharded, is_of_rows, rows_of
from lowtide._sharding.unit import UnitState

_ALIGNMENT = 256  # bytes; torch's vectorized kernels want 16


@functools.cache
def _host_pool(device: torch.device) -> _C.PinnedPool:
    return _C.PinnedPool(
        device_memory(device), cap_bytes=pinned_cap(), holds="optimizer states"
    )


@dataclass
class _Place:
    parameter: Tensor  # whose state it is, of the optimizer's
    name: str
    host: Tensor  # in the block
    offset: int  # there, in bytes


@dataclass
class _Block:
    """A unit's states."""

    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    places: list[_Place] = field(default_factory=list)


class HostStates:
    """Of one optimizer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[Any, _Block] = {}  # by their unit

    def on_device(
        self, unit: Any, way_in: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """The unit's block there, and what is in it by the id of what is in a state.
        ``way_in`` gets what is to be copied."""
        block = self._blocks.get(unit)
        if block is None:
            return None, {}
        copied = torch.empty_like(block.host, device=self._device)
        way_in.append((copied, block.host))
        return copied, {
            id(place.host): _part(copied, place.offset, place.host)
            for place in block.places
        }

    def put(
        self,
        optimizer: Optimizer,
        unit: Any,
        parameters: list[Any],
        there: Mapping[int, Tensor],
        copied: Tensor | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """States of these parameters, and of all that the block has, are in it from now
        on: what is to be copied where. ``there`` and ``copied``: of ``on_device``."""
        before = self._blocks.get(unit, _Block())
        of_unit = {id(place.parameter): place.parameter for place in before.places}
        of_unit |= {id(p): p for p in parameters}
        found = [
            (p, name, value)
            for p in of_unit.values()
            if p in optimizer.state
            for name, value in optimizer.state[p].items()
            if is_of_rows(value, p)
        ]
        block = self._block_for(unit, before, found)
        pairs = []
        for place, (p, name, value) in zip(block.places, found, strict=True):
            rows = rows_of(value)
            if rows is not place.host:
                pairs.append((place.host, there.get(id(rows), rows)))
                optimizer.state[p][name] = as_sharded(p, place.host)
            elif copied is not None:
                pairs.append((place.host, there[id(rows)]))
        if copied is not None and all(
            rows_of(value) is place.host
            for place, (_, _, value) in zip(block.places, found, strict=True)
        ):
            pairs = [(block.host, copied)]
        return pairs

    def _block_for(self, unit: Any, before: _Block, found: Sequence[Any]) -> _Block:
        """The same one, unless there are other states."""
        same = len(found) == len(before.places) and all(
            place.parameter is p
            and place.name == name
            and place.host.dtype == rows_of(value).dtype
            and place.host.shape == rows_of(value).shape
            for place, (p, name, value) in zip(before.places, found, strict=True)
        )
        if same:
            return before
        offsets, size = [], 0
        for _, _, value in found:
            offsets.append(size)
            size += -(-rows_of(value).nbytes // _ALIGNMENT) * _ALIGNMENT
        name = unit.name if isinstance(unit, UnitState) else "no unit"
        host = _host_pool(self._device).host_tensor(
            device_memory(self._device),
            name,
            max(size, _ALIGNMENT),  # rows may be none
        )
        block = _Block(host)
        for (p, name, value), offset in zip(found, offsets, strict=True):
            place = _part(host, offset, rows_of(value))
            block.places.append(_Place(p, name, place, offset))
        self._blocks[unit] = block
        return block


def _part(block: Tensor, offset: int, like: Tensor) -> Tensor:
    """Of the bytes from ``offset`` on, with the strides of ``like`` if it is dense. It
    has a storage of its own, which whoever copies or pickles it takes whole, and begins
    there, without which torch does not deep-copy ``DTensor``s (2.11)."""
    begin = int(block.storage_offset()) + offset
    storage = block.untyped_storage()[begin : begin + like.nbytes]
    pairs = zip(like.shape, like.stride(), strict=True)
    dense = like.numel() == 0 or sum((n - 1) * s for n, s in pairs) < like.numel()
    part = torch.empty(0, dtype=like.dtype, device=block.device)
    if dense:
        return part.set_(storage, 0, like.shape, like.stride())
    return part.set_(storage).view(like.shape)
