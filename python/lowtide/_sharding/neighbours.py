"""Parameters that lie side by side step as one tensor.

[Note: Neighbours as one]
A step's host time is by the tensor. A unit's shards follow each other in memory and
their gradients do in the same order, so of neighbours one plain tensor is stepped, and
what the optimizer makes as its state is a tensor for all of them. The optimizer, its
state dict and checkpoints have each parameter's own: parts, whose bytes are the
whole's. Bits are the same where an element's do not depend on its place in a tensor:
on CUDA. On CPUs the elements behind a tensor's last whole vector are rounded otherwise.
States of a whole unit are only made where they lie apart (see [Note: States lie
apart]): in default segments they would split what larger tensors come back to (Llama 8B
at 64 ranks reserves 7.5 GiB with them, 7.2 without, simulated).

Counters, tensors without dimensions as ``step``, are each parameter's own, too. The
first one's is what the optimizer counts; the others get its value behind the step.
That they were equal before is known as long as nobody else has written one; else they
are read, once. Where some neighbours have a gradient and others do not, counters part,
and from then on these parameters step one by one.

``lowtide.load`` makes states so, too. Those that others load, or that the program has
replaced, lie where they are and step one by one: laying them side by side in a step,
between gradients, would leave holes.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowtide import _C
from lowtide._sharding.local_parameter import same_layout
from lowtide._sharding.state_pool import for_states, segments_expand
from lowtide._sharding.subclass import is_extended

_MOST_ELEMENTS = 2**31 - 1  # of a tensor; kernels for lists count in 32 bits


class Neighbours:
    """Of an optimizer, from step to step."""

    def __init__(self) -> None:
        # By the ids of a group's parameters, which it keeps: them, and the others.
        self._of_groups: dict[tuple[int, ...], tuple[list[Run], list[Any]]] = {}
        self.stepping: list[Run] = []
        self._wanted: bool | None = None  # not known yet

    def wholes_of(
        self, optimizer: Optimizer, parameters: Sequence[Any]
    ) -> tuple[list[tuple[Tensor, "WholeState"]], Sequence[Any]]:
        """Of those of a group that are to step as one, and its other parameters."""
        runs, others = self._among(parameters)
        wholes = []
        with for_states(optimizer, parameters):
            for run in runs:
                if (whole := run.whole(optimizer.state)) is not None:
                    wholes.append(whole)
                    self.stepping.append(run)
                else:
                    others = [*others, *run.parameters]
        return wholes, others

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> None:
        """Behind a step, and ahead of one for what a step that raised has left."""
        makes = any(run.makes_states for run in self.stepping)
        counters = [each for run in self.stepping for each in run.end()]
        if counters:
            torch.ops.lowtide.foreach_copy_(
                [each.others for each in counters], [each.firsts for each in counters]
            )
        for each in counters:
            each.know()
        self.stepping = []
        if makes:  # as they would have been made one by one
            states = optimizer.state
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p in states:
                        states[p] = states.pop(p)

    def _among(self, parameters: Sequence[Any]) -> tuple[list["Run"], list[Any]]:
        key = tuple(map(id, parameters))
        if (found := self._of_groups.get(key)) is None:
            runs = self._runs_of([*filter(_may_be_one, parameters)])
            in_runs = {id(p) for run in runs for p in run.parameters}
            others = [p for p in parameters if id(p) not in in_runs]
            found = self._of_groups[key] = runs, others
        return found

    def _runs_of(self, parameters: Sequence[Any]) -> list["Run"]:
        if parameters and self._wanted is None:
            self._wanted = step_as_one(parameters[0]._local_tensor.device)
        return _runs_of(parameters) if self._wanted else []

    def leave(self) -> None:
        """There will be no such step."""
        self.stepping = []


def lay_side_by_side(
    parameters: Sequence[Any], states: Mapping[Any, dict[str, Any]]
) -> None:
    """New states of a group's parameters, which are the caller's alone, where the
    optimizer would have made them as one: each is put in the place of what it was."""
    runs, _ = Neighbours()._among(parameters)
    for run in runs:
        of_each = [states.get(p, {}) for p in run.parameters]
        for name in of_each[0]:
            values: list[Any] = [state.get(name) for state in of_each]
            if not all(map(isinstance, values, repeat(DTensor))):
                continue
            if len({(v.dtype, v.device) for v in values}) > 1:
                continue
            if not all(map(_is_alike, values, run.parameters)):
                continue
            locals_ = [value._local_tensor for value in values]
            whole = torch.cat([local.flatten() for local in locals_])
            for p, state, part in zip(
                run.parameters, of_each, _C.parts_of(whole, locals_), strict=True
            ):
                state[name] = DTensor(part, p._spec, requires_grad=False)


class Run:
    """Parameters of one group that follow each other in memory."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.parameters = list(parameters)
        self.makes_states = False  # in the step that is under way
        self._counters: dict[str, _Counters] = {}
        self._apart = False  # they have parted

    def whole(self, states: Any) -> "tuple[Tensor, WholeState] | None":
        """Of all of them, with its gradient, for one step of an optimizer that has
        ``states``; None where they are to step one by one."""
        if self._apart:
            return None
        gradients = [p.grad for p in self.parameters]
        missing = sum(map(is_, gradients, repeat(None)))
        if missing:
            self._apart = missing < len(gradients) and bool(self._counters)
            return None
        if not all(map(isinstance, gradients, repeat(DTensor))):
            return None
        rows = _C.rows_as_one(self.parameters, self.parameters)
        gradient = _C.rows_as_one(gradients, self.parameters)
        if rows is None or gradient is None:
            return None
        state = self._state(states, rows)
        if state is None:
            return None
        if gradient.dtype != rows.dtype:
            rows.grad_dtype = None
        rows.grad = gradient
        return rows, state

    def end(self) -> "Iterable[_Counters]":
        """Behind a step; what is to follow its first one."""
        self.makes_states = False
        return self._counters.values()

    # -- states -----------------------------------------------------------------------

    def _state(self, states: Any, rows: Tensor) -> "WholeState | None":
        of_each = [*map(states.get, self.parameters)]
        state = WholeState(self, states, rows)
        self.makes_states = not any(of_each)
        if self.makes_states:
            return state
        if not all(of_each):
            self._apart = True
            return None
        if len({*map(len, of_each)}) > 1:
            return None
        for name in of_each[0]:
            values = [each.get(name) for each in of_each]
            if not self._take(state, name, values):
                return None
        return state

    def _take(self, state: "WholeState", name: str, values: list[Any]) -> bool:
        first = values[0]
        if isinstance(first, DTensor):
            if not all(map(isinstance, values, repeat(DTensor))):
                return False
            whole = _C.rows_as_one(values, self.parameters)
            if whole is None:
                return False
        elif isinstance(first, Tensor):
            counters = self._counters_of(state, name, values)
            if counters is None:
                return False
            whole = counters.first
        else:
            if any(isinstance(v, Tensor) or v != first for v in values):
                return False
            whole = first
        state.know(name, whole)
        return True

    def _counters_of(
        self, state: "WholeState", name: str, values: list[Any]
    ) -> "_Counters | None":
        known = self._counters.get(name)
        ours = known is not None and known.are(values)
        if known is not None and ours and known.is_known():
            return known
        first = values[0]
        if first.dim() != 0 or len({*map(_kind, values)}) > 1:
            return None
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if bool((torch.stack(values) != first).any()):
            self._apart = True
            return None
        if known is not None and ours:
            known.know()
            return known
        return self.count(state, name, first)

    def count(self, state: "WholeState", name: str, value: Tensor) -> "_Counters":
        """All from ``value`` on."""
        counters = self._counters[name] = _Counters(value, len(self.parameters))
        state.set_each(name, counters.each)
        return counters


class _Counters:
    """One of each parameter, by a name."""

    @torch.no_grad()
    def __init__(self, value: Tensor, number: int) -> None:
        self._all = value.detach().repeat(number)
        self.each = [self._all[i].detach() for i in range(number)]
        self.first = self.each[0]
        self.others = self._all[1:]
        self.firsts = self.first.expand(number - 1)
        self.know()

    def are(self, values: Iterable[Any]) -> bool:
        return all(map(is_, values, self.each))

    def know(self) -> None:
        """They are equal."""
        self._version = self._all._version

    def is_known(self) -> bool:
        return self._all._version == self._version


class WholeState(dict[str, Any]):
    """A run's, for one step; what is set is set in the states of its parameters."""

    def __init__(self, run: Run, states: Any, rows: Tensor) -> None:
        self._run, self._states, self._rows = run, states, rows

    def know(self, name: str, value: Any) -> None:
        """It is there."""
        super().__setitem__(name, value)

    def set_each(self, name: str, values: Iterable[Any]) -> None:
        for p, value in zip(self._run.parameters, values, strict=True):
            self._states[p][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self and self[name] is value:
            return
        parameters = self._run.parameters
        if not isinstance(value, Tensor):
            self.set_each(name, [value] * len(parameters))
        elif value.dim() == 0:
            value = self._run.count(self, name, value).first
        else:
            assert value.shape == self._rows.shape, name
            value = value.contiguous()
            parts = _C.parts_of(value, [p._local_tensor for p in parameters])
            self.set_each(
                name,
                (
                    DTensor(part, p._spec, requires_grad=False)
                    for p, part in zip(parameters, parts, strict=True)
                ),
            )
        self.know(name, value)


def _is_alike(state: Any, parameter: Any) -> bool:
    shape: torch.Size = state._local_tensor.shape
    return (
        same_layout(state._spec, parameter._spec)
        and shape == parameter._local_tensor.shape
    )


def _kind(value: Any) -> Any:
    """Of a state."""
    if type(value) is not Tensor:
        return type(value)
    return value.dtype, value.device, value.shape


def step_as_one(device: torch.device) -> bool:
    """See [Note: Neighbours as one]."""
    return device.type == "cuda" and segments_expand()


def _runs_of(parameters: Sequence[Any]) -> list[Run]:
    """The longest there are, of two parameters or more."""
    found: list[list[Any]] = []
    numel = 0
    for p in sorted(parameters, key=_address):
        last = found[-1][-1] if found else None
        numel += p._local_tensor.numel()
        if last is not None and numel <= _MOST_ELEMENTS and _follows(last, p):
            found[-1].append(p)
        else:
            found.append([p])
            numel = p._local_tensor.numel()
    return [Run(each) for each in found if len(each) > 1]


def _may_be_one(p: Any) -> bool:
    if not isinstance(p, DTensor) or not p.requires_grad:
        return False
    return p._local_tensor.numel() > 0 and not is_extended(p._local_tensor)


def _address(p: Any) -> int:
    address: int = p._local_tensor.data_ptr()
    return address


def _follows(one: Any, other: Any) -> bool:
    return _C.rows_as_one([one, other], [one, other]) is not None
