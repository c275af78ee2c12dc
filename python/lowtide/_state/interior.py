"""Sees the operators of a region's forward, so that what produced a stored value is
not run again.

Two dispatch modes, active only in regions whose policy stores values that are produced
inside: one finds the operator behind a named value, the other returns the stored value
in its place.  They cost some microseconds an operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _C

# How much the other values of an operator may add to a named one.  Attention returns
# its softmax's logarithms with its output; a split returns everything.
SIBLING_SHARE = 0.25

# (operator, how many of its calls came before)
Call = tuple[Any, int]


@dataclasses.dataclass
class _Produced:
    """What an operator returned; holds none of the large values."""

    call: Call
    several: bool
    # Per value: (sizes, strides, offset), or the value itself.
    values: list[Any]
    random_state: list[tuple[torch.Generator, Tensor]]
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Skip:
    """A call that is not repeated."""

    number: int  # of the stored values in the frame
    several: bool
    others: dict[int, Any]  # place -> what is not a tensor
    random_state: list[tuple[torch.Generator, Tensor]]


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[Any, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile in the region compiles as without it

    def _count(self, operator: Any) -> Call:
        index = self._calls.get(operator, 0)
        self._calls[operator] = index + 1
        return operator, index


class Recorder(_Mode):
    """Active while ``frame``'s forward runs; then ``skips`` says what a recomputation
    leaves out."""

    def __init__(self, frame: _C.Frame) -> None:
        super().__init__()
        self.skips: dict[Call, Skip] = {}
        self._frame = frame
        self._producers = _C.ProducerMap()
        self._produced: list[_Produced] = []

    def __enter__(self) -> Recorder:
        self._frame.watch_interior(self._store)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # The frame holds the watcher, which holds the frame.
        self._frame.watch_interior(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        call = self._count(func)
        if _makes_new_values(func):
            self._remember(call, result)
        return result

    def _remember(self, call: Call, result: Any) -> None:
        several = isinstance(result, (tuple, list))
        values = list(result) if several else [result]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors:
            return
        for value in tensors:
            self._producers.add(value, len(self._produced))
        largest = max(tensors, key=lambda value: value.nbytes)
        others = sum(value.nbytes for value in tensors if value is not largest)
        refusal = ""
        if others > SIBLING_SHARE * largest.nbytes:
            refusal = f"{call[0]} returns several values of this size"
        held = [
            (tuple(value.shape), value.stride(), value.storage_offset())
            if value is largest or (refusal and isinstance(value, Tensor))
            else value
            for value in values
        ]
        random_state = _random_state(largest.device) if _is_random(call[0]) else []
        self._produced.append(_Produced(call, several, held, random_state, refusal))

    def _store(self, tensor: Tensor, name: str) -> None:
        number, written_since = self._producers.find(tensor)
        if number < 0:
            self._frame.refuse(name, "no operator of the region produced it")
            return
        produced = self._produced[number]
        if produced.refusal or written_since:
            reason = produced.refusal or f"written to after {produced.call[0]} made it"
            self._frame.refuse(name, reason)
            return
        if (known := self.skips.get(produced.call)) is not None:
            self._frame.share(name, known.number)
            return
        outputs, others = [], {}
        for place, value in enumerate(produced.values):
            if isinstance(value, tuple):
                outputs.append(_over(tensor, *value))
            elif isinstance(value, Tensor):
                outputs.append(value)
            else:
                others[place] = value
        self.skips[produced.call] = Skip(
            self._frame.store(name, outputs),
            produced.several,
            others,
            produced.random_state,
        )


class Replayer(_Mode):
    """Active while the forward of ``frame`` is computed again."""

    def __init__(self, frame: _C.Frame, skips: dict[Call, Skip]) -> None:
        super().__init__()
        self._frame = frame
        self._skips = skips

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        skip = self._skips.get(self._count(func))
        if skip is None:
            return func(*args, **(kwargs or {}))
        for generator, state in skip.random_state:
            generator.set_state(state)
        values: list[Any] = self._frame.stored(skip.number)
        for place, value in sorted(skip.others.items()):
            values.insert(place, value)
        return tuple(values) if skip.several else values[0]


def _over(
    tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> Tensor:
    """The value as its operator returned it; ``tensor`` may be a view of it."""
    detached = tensor.detach()
    if detached.shape == sizes and detached.stride() == strides:
        return detached
    return detached.as_strided(sizes, strides, offset)


_new_values: dict[Any, bool] = {}


def _makes_new_values(operator: Any) -> bool:
    known = _new_values.get(operator)
    if known is None:
        schema = getattr(operator, "_schema", None)
        known = schema is not None and not (
            schema.is_mutable or any(r.alias_info is not None for r in schema.returns)
        )
        _new_values[operator] = known
    return known


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def _random_state(device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
    """Generators and their states, now that the operator has run."""
    generators = [torch.default_generator]
    # A captured region that draws numbers is refused (csrc/activation/forward_state.h).
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device.type != "cpu" and not captured:
        module = torch.get_device_module(device)
        generators.append(module.default_generators[device.index or 0])
    return [(generator, generator.get_state()) for generator in generators]
