"""States of an optimizer in page-locked host memory, on the device for a unit's step.

[Note: States on the host]
A unit's states are one block of host memory. For the unit's step the block is copied to
the device by a stream of its own, the step reads and writes that copy, and another
stream copies it back: the way in of a unit and the way out of the one before overlap,
each as fast as the link. Blocks of two units are on the device at most. A state that
the step has made, or that somebody has set, is on the device: it goes out behind the
step, into its unit's block.

What an optimizer's step asks of its groups is one loop over them. So the stand-in's
groups (see [Note: A step on rows]) are made while it loops, and a unit's states go out
when the loop asks for the next unit's. Where the step raises they do not: what was on
the host stays as it was, and states of the units before are a step ahead, as in any
torn step. ``step()`` returns when the last block is on the host, so whoever reads a
state reads what the step wrote.
"""

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide import _C
from lowtide._base.memory import device_memory, pinned_cap
from lowtide._base.optimizers import step_around
from lowtide._sharding import state_pool
from lowtide._sharding.local_parameter import (
    as_sharded,
    is_of_rows,
    rows_of,
    sharded_of,
)
from lowtide._sharding.owners import replacements
from lowtide._sharding.step_on_rows import (
    Rows,
    States,
    is_elementwise,
    on_rows,
    rows_with_gradients,
)
from lowtide._sharding.unit import UnitState, alive

_ALIGNMENT = 256  # bytes; torch's vectorized kernels want 16
_UNITS_ON_DEVICE = 2

_ATTRIBUTE = "lowtide_host_states"  # of optimizers: it leads to them through units

# Of a unit: its groups, whose parameters are the unit's alone.
Groups = list[dict[str, Any]]


def host_states_of(optimizer: Optimizer) -> "HostStates | None":
    return getattr(optimizer, _ATTRIBUTE, None)


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


class _Streams:
    """In and out, beside the current one; host memory needs none."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._into = self._module.Stream(device)
        self._out = self._module.Stream(device)
        self._device = device

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, out: bool) -> Any:
        """Behind what the current stream has now; an event behind the copies."""
        stream = self._out if out else self._into
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            _copy(pairs, non_blocking=True)
            return stream.record_event()

    def wait(self, event: Any) -> None:
        """The current one does."""
        self._module.current_stream(self._device).wait_event(event)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]], *, non_blocking: bool) -> None:
    for into, from_ in pairs:
        into.copy_(from_, non_blocking=non_blocking)


class HostStates:
    """Of one optimizer, which it does not keep alive."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._device = device
        self._streams = None if device.type == "cpu" else _Streams(device)
        self._blocks: dict[Any, _Block] = {}  # by their unit
        # Of those on their way out: an event behind it, and the copies on the device.
        self._leaving: deque[tuple[Any, Any]] = deque()
        self._by_unit: list[tuple[Any, list[tuple[int, list[Tensor]]]]] = []
        self._stamp: Any = None
        setattr(optimizer, _ATTRIBUTE, self)
        state_pool.let_go(optimizer)  # made on the device, they leave it at once
        step_around(optimizer, _settle_after)
        optimizer.register_load_state_dict_post_hook(_move_out)

    def stand_in(self, known: Rows) -> Any:
        """For a step of all parameters that have a gradient."""
        optimizer = self._optimizer()
        assert optimizer is not None
        groups = optimizer.param_groups
        units = (
            (unit, [{**groups[i], "params": parameters} for i, parameters in chosen])
            for unit, chosen in self._units(optimizer)
        )
        return self.stand_in_for(units, known)

    def stand_in_for(self, units: Iterable[tuple[Any, Groups]], known: Rows) -> Any:
        """For a step of some units' parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if not is_elementwise(optimizer):
            raise RuntimeError(
                f"lowtide: {type(optimizer).__name__}: expected the class's own step "
                "for states on the host, got another function in its place. Replace "
                "the optimizer's step instead of the class's."
            )
        stood_in = on_rows(optimizer, known, (), {})
        # Without a reference to what has it: that goes with the step.
        groups = self._of_units(weakref.ref(stood_in), units, known)
        vars(stood_in)["param_groups"] = groups
        return stood_in

    def settle(self) -> None:
        """The host waits until states are where they belong."""
        for event, _ in self._leaving:
            event.synchronize()
        self._leaving.clear()

    def move_out(self) -> None:
        """What is on the device, as all states are behind ``load_state_dict``."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for unit, chosen in self._units(optimizer):
            self._put(
                unit, [p for _, parameters in chosen for p in parameters], None, {}
            )
        self.settle()

    # -- a step -----------------------------------------------------------------------

    def _of_units(
        self, stood_in: Any, units: Iterable[tuple[Any, Groups]], known: Rows
    ) -> Iterator[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        for unit, groups in units:
            of_rows = [_rows(optimizer, group, known) for group in groups]
            if not any(group["params"] for group in of_rows):
                continue
            copied, there = self._bring(unit)
            vars(stood_in())["state"] = States(optimizer.state, there)
            yield from of_rows
            self._put(
                unit, [p for group in groups for p in group["params"]], copied, there
            )

    def _bring(self, unit: Any) -> tuple[Tensor | None, dict[int, Tensor]]:
        """The unit's block on the device, and what is in it by the id of what is in a
        state."""
        while len(self._leaving) >= _UNITS_ON_DEVICE:
            self._let_go()
        block = self._blocks.get(unit)
        if block is None:
            return None, {}
        copied = torch.empty_like(block.host, device=self._device)
        self._wait(self._copied([(copied, block.host)], out=False))
        return copied, {
            id(place.host): _part(copied, place.offset, place.host)
            for place in block.places
        }

    @torch.no_grad()
    def _put(
        self,
        unit: Any,
        parameters: list[Any],
        copied: Tensor | None,
        there: dict[int, Tensor],
    ) -> None:
        """States of these parameters, and of all that the block has, into it."""
        optimizer = self._optimizer()
        assert optimizer is not None
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
        if pairs and (event := self._copied(pairs, out=True)) is not None:
            self._leaving.append((event, pairs))

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

    def _copied(self, pairs: list[tuple[Tensor, Tensor]], *, out: bool) -> Any:
        if self._streams is not None:
            return self._streams.copy(pairs, out=out)
        _copy(pairs, non_blocking=False)
        return None

    def _wait(self, event: Any) -> None:
        if self._streams is not None:
            self._streams.wait(event)

    def _let_go(self) -> None:
        """Of what has left first; its bytes are the current stream's again."""
        event, _ = self._leaving.popleft()
        self._wait(event)

    # -- which parameters are whose ---------------------------------------------------

    def _units(self, optimizer: Optimizer) -> Any:
        """Parameters by group, by unit."""
        stamp = (replacements(), [len(g["params"]) for g in optimizer.param_groups])
        if stamp == self._stamp:
            return self._by_unit
        of = {id(owner.shard): unit for unit in alive for owner in unit.parameters}
        found: dict[Any, dict[int, list[Tensor]]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                unit = of.get(id(sharded_of(p)), self)
                found.setdefault(unit, {}).setdefault(number, []).append(p)
        self._by_unit = [(unit, list(groups.items())) for unit, groups in found.items()]
        self._stamp = stamp
        return self._by_unit


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


def _rows(optimizer: Optimizer, group: dict[str, Any], known: Rows) -> dict[str, Any]:
    rows = rows_with_gradients(group["params"], known)
    if rows is None or group["differentiable"]:
        raise RuntimeError(
            f"lowtide: {type(optimizer).__name__}: expected, for states on the host, "
            "parameters and gradients whose rows are plain tensors and have the same "
            "placements, and a step that is not differentiated, got others. Leave "
            "offload_states out."
        )
    return {**group, "params": rows}


def _settle_after(
    optimizer: Optimizer, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Also after a step that raised."""
    try:
        return call(optimizer, *args, **kwargs)
    finally:
        _states(optimizer).settle()


def _move_out(optimizer: Optimizer) -> None:
    _states(optimizer).move_out()


def _states(optimizer: Optimizer) -> HostStates:
    states = host_states_of(optimizer)
    assert states is not None
    return states
