"""Sees the operators of a region's forward, so that what produced a stored value is
not run again.

Two dispatch modes, active only in regions whose policy stores values that are produced
inside: one finds the operator behind a named value, the other returns the stored value
in its place.  They cost some microseconds an operator.

A call of the second forward is that of the first if its operator is the same one and
its arguments came about in the same way (csrc/activation/lineage.h), and as many equal
calls came before.  Any other call is run.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _C

# How much the other values of an operator may add to a named one.  Attention returns
# its softmax's logarithms with its output; a split returns everything.
SIBLING_SHARE = 0.25

# (hash of operator and arguments, how many equal calls came before)
Call = tuple[int, int]

NOT_REPEATED = (
    "the second forward did not make it as the first did, so it was computed again"
)


class _Geometry(NamedTuple):
    """Of a value that is not held while nobody has named it."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Any

    @classmethod
    def of(cls, value: Tensor) -> _Geometry:
        offset = value.storage_offset()
        return cls(value.dtype, value.shape, value.stride(), offset)

    def over(self, tensor: Tensor) -> Tensor:
        """The value as its operator returned it; ``tensor`` may be a view of it."""
        return _C.over_bytes(tensor, self.dtype, self.sizes, self.strides, self.offset)


class _Produced(NamedTuple):
    """What an operator returned; holds none of the large values."""

    call: Call
    operator: Any
    several: bool
    values: list[Any]  # the largest one's geometry, the others themselves
    largest: int  # its place
    random_state: list[tuple[torch.Generator, Tensor]]
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Skip:
    """A call that is not repeated."""

    name: str
    number: int  # of the stored values in the frame
    place: int  # how many tensors were saved before it was named
    several: bool
    others: dict[int, Any]  # place -> what is not a tensor
    random_state: list[tuple[torch.Generator, Tensor]]


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.lineage = _C.Lineage()
        self._num_calls: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile in the region compiles as without it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        effect = _effect_of(func)
        if not effect.known or _casts_parameter(func, args):
            return func(*args, **kwargs)
        key = self.key_of(func, args, kwargs)
        if effect.makes_new_values:
            return self.make(func, args, kwargs, key)
        result = func(*args, **kwargs)
        for written in effect.written(args, kwargs):
            self.lineage.wrote(written, key)
        return result

    def make(self, func: Any, args: Any, kwargs: Any, key: int) -> Any:
        """A call that makes new values, and nothing else."""
        raise NotImplementedError

    def count(self, key: int) -> Call:
        index = self._num_calls.get(key, 0)
        self._num_calls[key] = index + 1
        return key, index

    def key_of(self, operator: Any, args: Any, kwargs: Any) -> int:
        """Hash of a call, before it runs."""
        tokens = [operator, *map(self._token, args)]
        for name, value in kwargs.items():
            tokens += (name, self._token(value))
        return hash(tuple(tokens)) & 0xFFFF_FFFF_FFFF_FFFF

    def _token(self, value: Any) -> Any:
        if type(value) is Tensor:  # before `isinstance`, which asks a metaclass
            return self.lineage.of(value)
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                self.lineage.given(value)
            return self.lineage.of(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._token, value))
        return value if isinstance(value, _COMPARABLE) else type(value)


_COMPARABLE = (
    *(int, float, complex, str, type(None), torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Recorder(_Mode):
    """Active while ``frame``'s forward runs; then ``skips`` says what a recomputation
    leaves out."""

    def __init__(self, frame: _C.Frame) -> None:
        super().__init__()
        self.skips: dict[Call, Skip] = {}
        self._frame = frame
        self._produced: list[_Produced] = []

    def __enter__(self) -> Recorder:
        self._frame.watch_interior(self._store)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # The frame holds the watcher, which holds the frame.
        self._frame.watch_interior(None)

    def make(self, func: Any, args: Any, kwargs: Any, key: int) -> Any:
        result = func(*args, **kwargs)
        self._remember(func, self.count(key), result)
        return result

    def _remember(self, operator: Any, call: Call, result: Any) -> None:
        several = isinstance(result, (tuple, list))
        values = list(result) if several else [result]
        sizes = [v.nbytes if isinstance(v, Tensor) else -1 for v in values]
        largest = sizes.index(max(sizes, default=-1)) if sizes else 0
        if not sizes or sizes[largest] < 0:
            return
        for place, value in enumerate(values):
            if isinstance(value, Tensor):
                self.lineage.made(value, call[0], len(self._produced), place)
        is_random = _effect_of(operator).is_random
        random = _random_state(values[largest].device) if is_random else []
        refusal = ""
        others = sum(size for size in sizes if size > 0) - sizes[largest]
        if others > SIBLING_SHARE * sizes[largest]:
            refusal = f"{operator} returns several values of this size"
            values = []
        else:
            values[largest] = _Geometry.of(values[largest])
        self._produced.append(
            _Produced(call, operator, several, values, largest, random, refusal)
        )

    def _store(self, tensor: Tensor, name: str) -> None:
        number, place, written_since = self.lineage.producer_of(tensor)
        if number < 0:
            self._frame.refuse(name, "no operator of the region produced it")
            return
        produced = self._produced[number]
        refusal = produced.refusal
        if not refusal and place != produced.largest:
            refusal = f"{produced.operator} returns a larger value with it"
        if not refusal and written_since:
            refusal = f"written to after {produced.operator} made it"
        if refusal:
            self._frame.refuse(name, refusal)
            return
        if (known := self.skips.get(produced.call)) is not None:
            self._frame.share(name, known.number)
            return
        outputs, others = [], {}
        for place, value in enumerate(produced.values):
            if isinstance(value, _Geometry):
                outputs.append(value.over(tensor))
            elif isinstance(value, Tensor):
                outputs.append(value)
            else:
                others[place] = value
        self.skips[produced.call] = Skip(
            name,
            self._frame.store(name, outputs),
            self._frame.num_saved,
            produced.several,
            others,
            produced.random_state,
        )


class Replayer(_Mode):
    """Active while the forward of ``frame`` is computed again."""

    def __init__(self, frame: _C.Frame, skips: dict[Call, Skip]) -> None:
        super().__init__()
        self._frame = frame
        self._skips = {
            call: skip for call, skip in skips.items() if frame.is_stored(skip.number)
        }
        self._missing = set(self._skips)

    def make(self, func: Any, args: Any, kwargs: Any, key: int) -> Any:
        call = self.count(key)
        skip = self._skips.get(call)
        result = func(*args, **kwargs) if skip is None else self._stored(call, skip)
        several = isinstance(result, (tuple, list))
        for place, value in enumerate(result if several else [result]):
            if isinstance(value, Tensor):
                self.lineage.made(value, key, 0, place)
        return result

    def _stored(self, call: Call, skip: Skip) -> Any:
        self._missing.discard(call)
        for generator, state in skip.random_state:
            generator.set_state(state)
        values: list[Any] = self._frame.stored(skip.number)
        for place, value in sorted(skip.others.items()):
            values.insert(place, value)
        return tuple(values) if skip.several else values[0]

    def finish(self, num_saved: int) -> None:
        """After a recomputation that came to ``num_saved`` tensors: says which stored
        values it passed without meeting the call that made them."""
        names = set()
        for call in self._missing:
            skip = self._skips[call]
            if skip.place < num_saved:
                self._frame.refuse(skip.name, NOT_REPEATED)
                names.add(skip.name)
        if names:
            listed = ", ".join(map(repr, sorted(names)))
            warnings.warn(
                f"lowtide: {self._frame.who}: expected the second forward to make "
                f"{listed} as the first did, got another operator or other arguments, "
                "so what was stored was not used. Make the forward a function of its "
                "arguments, or remove the name.",
                stacklevel=2,
            )


@dataclasses.dataclass(frozen=True)
class _Effect:
    """What an operator does by its schema."""

    known: bool  # False for higher-order operators
    makes_new_values: bool = False
    is_random: bool = False
    writes: tuple[tuple[int, str], ...] = ()  # places and names of arguments

    def written(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        for place, name in self.writes:
            value = args[place] if place < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor):
                    yield tensor


_effects: dict[Any, _Effect] = {}


def _effect_of(operator: Any) -> _Effect:
    known = _effects.get(operator)
    if known is None:
        schema = getattr(operator, "_schema", None)
        known = _Effect(False) if schema is None else _effect_by(schema, operator.tags)
        _effects[operator] = known
    return known


def _effect_by(schema: Any, tags: Any) -> _Effect:
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = any(r.alias_info is not None for r in schema.returns)
    is_random = torch.Tag.nondeterministic_seeded in tags
    return _Effect(True, not writes and not aliases, is_random, writes)


_TO_COPY = torch.ops.aten._to_copy.default


def _casts_parameter(operator: Any, args: Any) -> bool:
    """As autocast does; it may find the result in its cache the next time."""
    return operator is _TO_COPY and isinstance(args[0], nn.Parameter)


def _random_state(device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
    """Generators and their states, now that the operator has run."""
    generators = [torch.default_generator]
    # A captured region that draws numbers is refused (csrc/activation/forward_state.h).
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device.type != "cpu" and not captured:
        module = torch.get_device_module(device)
        generators.append(module.default_generators[device.index or 0])
    return [(generator, generator.get_state()) for generator in generators]
