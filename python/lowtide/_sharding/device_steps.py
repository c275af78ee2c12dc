"""An optimizer's step, unit by unit, of what is on the host between steps: states,
parameters, or both.

[Note: Steps of what is on the host]
For a unit's step its states, and its parameters and their gradients where
``CPUOffloadPolicy`` has these on the host, are copied to the device by a stream of its
own, the step reads and writes the copies, and another stream copies back what it wrote:
the way in of a unit and the way out of the one before overlap, each as fast as the
link. Copies of two units are on the device at most.

What an optimizer's step asks of its groups is one loop over them. So the stand-in's
groups (see [Note: A step on rows]) are made while it loops, and what a unit has goes
out when the loop asks for the next unit's. Where the step raises it does not: what was
on the host stays as it was, and the units before are a step ahead, as in any torn step.
``step()`` returns when the last copy is on the host, so whoever reads a state or a
parameter reads what the step wrote.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide._base.optimizers import step_around
from lowtide._sharding import state_pool
from lowtide._sharding.host_states import HostStates
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

_UNITS_ON_DEVICE = 2

_ATTRIBUTE = "lowtide_device_steps"  # of optimizers: it leads to them through units

# Of a unit: its groups, whose parameters are the unit's alone.
Groups = list[dict[str, Any]]
Pairs = list[tuple[Tensor, Tensor]]  # into, from


def device_steps_of(optimizer: Optimizer) -> "DeviceSteps | None":
    return getattr(optimizer, _ATTRIBUTE, None)


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


class DeviceSteps:
    """Of one optimizer, which it does not keep alive. ``states``: where they are
    between steps, None for the device."""

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        states: HostStates | None,
        *,
        brings_parameters: bool = False,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._device = device
        self._states = states
        self.brings_parameters = brings_parameters
        self._streams = None if device.type == "cpu" else _Streams(device)
        # Of those on their way out: an event behind it, and the copies on the device.
        self._leaving: deque[tuple[Any, Any]] = deque()
        self._by_unit: list[tuple[Any, list[tuple[int, list[Tensor]]]]] = []
        self._stamp: Any = None
        setattr(optimizer, _ATTRIBUTE, self)
        if states is not None:
            state_pool.let_go(optimizer)  # made on the device, they leave it at once
        # Compiled code would step where tensors are.
        step_around(optimizer, torch.compiler.disable(_settle_after))
        optimizer.register_load_state_dict_post_hook(_place)

    @property
    def states_on_host(self) -> bool:
        return self._states is not None

    @property
    def is_settled(self) -> bool:
        """All is where it belongs between steps."""
        return not self._leaving

    def stand_in(self, known: Rows) -> Any:
        """For a step of all parameters that have a gradient."""
        return self.stand_in_for(self._groups(), known)

    def stand_in_for(self, units: Iterable[tuple[Any, Groups]], known: Rows) -> Any:
        """For a step of some units' parameters."""
        optimizer = self._alive()
        if not is_elementwise(optimizer):
            raise RuntimeError(
                f"lowtide: {type(optimizer).__name__}: expected the class's own step "
                "for what is on the host, got another function in its place. Replace "
                "the optimizer's step instead of the class's."
            )
        stood_in = on_rows(optimizer, known, (), {})
        # Without a reference to what has it: that goes with the step.
        groups = self._of_units(weakref.ref(stood_in), units, known)
        vars(stood_in)["param_groups"] = groups
        return stood_in

    def settle(self) -> None:
        """The host waits until all is where it belongs."""
        for event, _ in self._leaving:
            event.synchronize()
        self._leaving.clear()

    def place(self) -> None:
        """States to where they are between steps, from where others have put them, as
        ``load_state_dict`` does."""
        for unit, groups in self._groups():
            self._keep_on_device(groups)
            if self._states is not None:
                self._send(self._states.put(self._alive(), unit, _all(groups), {}))
        self.settle()

    # -- a step -----------------------------------------------------------------------

    def _of_units(
        self, stood_in: Any, units: Iterable[tuple[Any, Groups]], known: Rows
    ) -> Iterator[dict[str, Any]]:
        optimizer = self._alive()
        for unit, groups in units:
            of_rows = [_rows(optimizer, group, known) for group in groups]
            if not any(group["params"] for group in of_rows):
                continue
            while len(self._leaving) >= _UNITS_ON_DEVICE:
                self._let_go()
            strays = self._keep_on_device(groups)
            way_in: Pairs = []
            there: dict[int, Tensor] = {}
            copied = None
            if self._states is not None:
                copied, there = self._states.on_device(unit, way_in)
                for rows in strays:
                    if id(rows) not in there:
                        there[id(rows)] = self._like(rows, way_in)
            if self.brings_parameters and _is_on_host(unit):
                of_rows = [self._on_device(group, way_in) for group in of_rows]
            if way_in:
                self._wait(self._copied(way_in, out=False))
            vars(stood_in())["state"] = States(optimizer.state, there)
            yield from of_rows
            written = [pair for group in of_rows for pair in self._written(group)]
            if self._states is not None:
                put = self._states.put(optimizer, unit, _all(groups), there, copied)
                written += put
            self._send(written)

    def _on_device(self, group: dict[str, Any], way_in: Pairs) -> dict[str, Any]:
        """Of rows on the host."""
        copies = []
        for rows in group["params"]:
            copy: Any = nn.Parameter(self._like(rows, way_in), rows.requires_grad)
            copy.grad_dtype = None
            copy.grad = self._like(rows.grad, way_in)
            copy.lowtide_sharded = getattr(rows, "lowtide_sharded", rows)
            copy.lowtide_host = rows
            copies.append(copy)
        return {**group, "params": copies}

    def _like(self, on_host: Tensor, way_in: Pairs) -> Tensor:
        copy = torch.empty_like(on_host, device=self._device, requires_grad=False)
        way_in.append((copy, on_host.detach()))
        return copy

    def _written(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """By the step, of copies of rows."""
        scaled = getattr(self._alive(), "grad_scale", None) is not None
        for copy in group["params"]:
            if (rows := getattr(copy, "lowtide_host", None)) is not None:
                yield rows, copy
                if scaled:  # fused ones unscale gradients
                    yield rows.grad, copy.grad

    def _keep_on_device(self, groups: Groups) -> list[Tensor]:
        """States that a step reads there and that are there between steps, too, where
        others have put them on the parameter's device. What of the host's is as long as
        a parameter stays: its rows."""
        states = self._alive().state
        on_host = []
        for group in groups:
            counts_there = group.get("fused") or group.get("capturable")
            for p in group["params"]:
                for name, value in states[p].items() if p in states else ():
                    if not isinstance(value, Tensor) or value.device == self._device:
                        continue
                    if not is_of_rows(value, p):
                        if counts_there:
                            states[p][name] = value.to(self._device)
                    elif self._states is not None:
                        on_host.append(rows_of(value))
                    else:
                        rows = rows_of(value).to(self._device)
                        states[p][name] = as_sharded(p, rows)
        return on_host

    # -- copies -----------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, pairs: Pairs) -> None:
        if pairs and (event := self._copied(pairs, out=True)) is not None:
            self._leaving.append((event, pairs))

    @torch.no_grad()
    def _copied(self, pairs: Pairs, *, out: bool) -> Any:
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

    def _alive(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _groups(self) -> Iterator[tuple[Any, Groups]]:
        optimizer = self._alive()
        groups = optimizer.param_groups
        for unit, chosen in self._units(optimizer):
            yield unit, [{**groups[i], "params": params} for i, params in chosen]

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


def _rows(optimizer: Optimizer, group: dict[str, Any], known: Rows) -> dict[str, Any]:
    rows = rows_with_gradients(group["params"], known)
    if rows is None or group["differentiable"]:
        raise RuntimeError(
            f"lowtide: {type(optimizer).__name__}: expected, for a step of what is on "
            "the host, parameters and gradients whose rows are plain tensors and have "
            "the same placements, and a step that is not differentiated, got others. "
            "Leave offload_states and step_on_device out."
        )
    return {**group, "params": rows}


def _settle_after(
    optimizer: Optimizer, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Also after a step that raised."""
    try:
        return call(optimizer, *args, **kwargs)
    finally:
        _steps(optimizer).settle()


def _place(optimizer: Optimizer) -> None:
    _steps(optimizer).place()


def _steps(optimizer: Optimizer) -> DeviceSteps:
    steps = device_steps_of(optimizer)
    assert steps is not None
    return steps


def _all(groups: Groups) -> list[Any]:
    return [p for group in groups for p in group["params"]]


def _is_on_host(unit: Any) -> bool:
    return isinstance(unit, UnitState) and unit.settings.host is not None
