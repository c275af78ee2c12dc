"""Sees the operators of a region's forward, so that what produced a stored value is
not run again.

Two dispatch modes, active only in regions whose policy stores values that are produced
inside: one finds the operator behind a named value, the other returns the stored value
in its place.  They cost some microseconds an operator.

[Note: Equal calls] A call of the second forward is that of the first if its operator is
the same one, its arguments came about in the same way (csrc/activation/lineage.h),
autograd had saved as many tensors before it, and as many equal calls came since that
one. Both forwards save the same tensors, so a call that only one of them makes, as to
fill a cache, shifts no other. Any other call is run.

[Note: Unseen writes] What writes through a pointer, as a kernel of Triton's or one that
a compiler fused, bumps no version. Its results lie in what an operator allocated or
copied, or what compiled code took from an operator: under a name that would be taken
for the operator's own result, and be written to again. So these are refused.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _C
from lowtide._base import debugging

# How much the other values of an operator may add to a named one.  Attention returns
# its softmax's logarithms with its output; a split returns everything.
SIBLING_SHARE = 0.25

# Hash of operator and arguments, number of tensors saved before, number of equal calls
# since: [Note: Equal calls].
Call = tuple[int, int, int]

NOT_REPEATED = (
    "the second forward did not make it as the first did, so it was computed again"
)


class _Geometry(NamedTuple):
    """How a value lies in memory, which is not held while nobody has named it."""

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
    """What an operator returned, without the large values themselves."""

    call: Call
    operator: Any
    several: bool
    values: list[Any]  # the largest one's geometry, the others themselves
    largest: int  # the place of the largest one
    random_state: list[tuple[torch.Generator, Tensor]]
    refusal: str
    in_function: bool  # without grad mode: of an autograd.Function, if it requires grad


@dataclasses.dataclass(frozen=True)
class Skip:
    """A call that is not repeated."""

    name: str
    number: int  # of the stored values in the frame
    place: int  # how many tensors were saved before it was named
    several: bool
    others: dict[int, Any]  # place -> what is not a tensor
    random_state: list[tuple[torch.Generator, Tensor]]
    stored: debugging.Stored | None  # as they were, when debugging


class _Mode(TorchDispatchMode):
    """Watches one forward with these tensor arguments; ``num_saved`` says how many
    tensors autograd has saved in it so far."""

    supports_higher_order_operators = True

    def __init__(self, arguments: list[Tensor], num_saved: Callable[[], int]) -> None:
        super().__init__()
        self.lineage = _C.Lineage(arguments)
        self.num_saved = num_saved
        self._num_calls: dict[tuple[int, int], int] = {}

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
        key = self.lineage.key_of(func, args, kwargs)
        if effect.makes_new_values:
            return self.make(func, args, kwargs, self._count(key))
        result = func(*args, **kwargs)
        for written in effect.written(args, kwargs):
            self.lineage.wrote(written, key)
            self.after_write(func, written)
        return result

    def make(self, func: Any, args: Any, kwargs: Any, call: Call) -> Any:
        """A call that makes new values, and nothing else."""
        raise NotImplementedError

    def after_write(self, func: Any, tensor: Tensor) -> None:
        pass

    def made(self, result: Any, call: Call, number: int) -> list[Any]:
        """The values of ``result``, which the ``number``-th call that makes new values
        has returned."""
        values = list(result) if isinstance(result, (tuple, list)) else [result]
        for place, value in enumerate(values):
            if isinstance(value, Tensor):
                self.lineage.made(value, call[0], number, place)
        return values

    def _count(self, key: int) -> Call:
        place = self.num_saved()
        index = self._num_calls.get((key, place), 0)
        self._num_calls[key, place] = index + 1
        return key, place, index


class Recorder(_Mode):
    """Active while ``frame``'s forward runs; then ``skips`` says what a recomputation
    leaves out."""

    def __init__(self, frame: _C.Frame, arguments: list[Tensor]) -> None:
        super().__init__(arguments, frame.num_saved)
        self.skips: dict[Call, Skip] = {}
        self._frame = frame
        self._produced: list[_Produced | None] = []

    def __enter__(self) -> Recorder:
        self._frame.watch_interior(self._store)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # The frame holds the watcher, which holds the frame.
        self._frame.watch_interior(None)

    def make(self, func: Any, args: Any, kwargs: Any, call: Call) -> Any:
        result = func(*args, **kwargs)
        values = self.made(result, call, len(self._produced))
        self._produced.append(
            self._remember(func, kwargs, call, values, type(result) in (tuple, list))
        )
        return result

    def _remember(
        self, func: Any, kwargs: Any, call: Call, values: list[Any], several: bool
    ) -> _Produced | None:
        sizes = [_num_bytes(value) for value in values]
        size = max(sizes, default=-1)
        if size < 0:
            return None
        largest = sizes.index(size)
        effect = _effect_of(func)
        random: list[tuple[torch.Generator, Tensor]] = []
        if effect.is_random:
            random = _random_state(values[largest].device, kwargs)
        in_function = not torch.is_grad_enabled()
        refusal = ""
        if effect.allocates:
            refusal = f"{func} allocated it, and no operator computed its values"
        elif in_function and _in_compiled_code():
            refusal = "made by compiled code"
        elif sum(each for each in sizes if each > 0) > (1 + SIBLING_SHARE) * size:
            refusal = f"{func} returns several values of this size"
        if refusal:
            values = []
        else:
            values[largest] = _Geometry.of(values[largest])
        return _Produced(
            *(call, func, several, values, largest, random, refusal, in_function)
        )

    def after_write(self, func: Any, tensor: Tensor) -> None:
        number, _, _ = self.lineage.producer_of(tensor)
        produced = self._produced[number] if number >= 0 else None
        if produced is not None and (skip := self.skips.get(produced.call)):
            self._frame.forbid_write(skip.number, str(func))

    def _store(self, tensor: Tensor, name: str, too_small: str = "") -> None:
        number, place, written_since = self.lineage.producer_of(tensor)
        produced = self._produced[number] if number >= 0 else None
        if produced is None:
            refusal = too_small or "no operator of the region produced it"
            self._frame.refuse(name, refusal)
            return
        refusal = produced.refusal
        if too_small and not _effect_of(produced.operator).communicates:
            refusal = too_small
        if not refusal and place != produced.largest:
            refusal = f"{produced.operator} returns a larger value with it"
        if not refusal and written_since:
            refusal = f"written to after {produced.operator} made it"
        if not refusal and produced.in_function and tensor.requires_grad:
            if _effect_of(produced.operator).copies:
                refusal = (
                    f"{produced.operator} copied it in an autograd.Function, which may "
                    "have computed its values since"
                )
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
            self.num_saved(),
            produced.several,
            others,
            produced.random_state,
            debugging.Stored(outputs) if debugging.enabled() else None,
        )


class Replayer(_Mode):
    """Active while the forward of ``frame`` is computed again."""

    def __init__(
        self,
        frame: _C.Frame,
        arguments: list[Tensor],
        num_saved: Callable[[], int],
        skips: dict[Call, Skip],
    ) -> None:
        super().__init__(arguments, num_saved)
        self._frame = frame
        self._skips = {
            call: skip for call, skip in skips.items() if frame.is_stored(skip.number)
        }
        self._missing = set(self._skips)

    def make(self, func: Any, args: Any, kwargs: Any, call: Call) -> Any:
        skip = self._skips.get(call)
        result = func(*args, **kwargs) if skip is None else self._stored(call, skip)
        self.made(result, call, 0)
        return result

    def _stored(self, call: Call, skip: Skip) -> Any:
        self._missing.discard(call)
        for generator, state in skip.random_state:
            generator.set_state(state)
        values: list[Any] = self._frame.stored(skip.number)
        if skip.stored is not None:
            skip.stored.require_same(values, self._frame.who, f"{skip.name!r}, value")
        for place, value in sorted(skip.others.items()):
            values.insert(place, value)
        return tuple(values) if skip.several else values[0]

    def finish(self) -> None:
        """After a recomputation: says which stored values it passed without meeting the
        call that made them."""
        num_saved = self.num_saved()
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
    """What an operator does, by its schema."""

    known: bool  # False for higher-order operators
    makes_new_values: bool = False
    is_random: bool = False
    writes: tuple[tuple[int, str], ...] = ()  # places and names of arguments
    allocates: bool = False  # values that depend on no tensor: [Note: Unseen writes]
    copies: bool = False
    communicates: bool = False  # left out on one rank, it is left out on all

    def written(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        for place, name in self.writes:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(name))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


_ALLOCATE = frozenset(
    f"aten::{prefix}{fill}{suffix}"
    for fill in ("empty", "zeros", "ones", "full")
    for prefix, suffix in (
        *(("", ""), ("", "_like"), ("new_", "")),
        *(("", "_strided"), ("new_", "_strided"), ("", "_permuted")),
    )
)
# torch 2.15 shows the second kind, 2.11 only what it calls.
_COLLECTIVES = ("_c10d_functional::", "_c10d_functional_autograd::")
_COPY = frozenset({"aten::clone", "aten::_to_copy"})

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
    if schema.name.startswith("c10d::") and schema.name.endswith("_"):
        writes = ((0, schema.arguments[0].name),)  # which their schemas keep quiet
    aliases = any(r.alias_info is not None for r in schema.returns)
    return _Effect(
        known=True,
        makes_new_values=not writes and not aliases,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        writes=writes,
        allocates=schema.name in _ALLOCATE,
        copies=schema.name in _COPY,
        communicates=schema.name.startswith(_COLLECTIVES),
    )


_TO_COPY = torch.ops.aten._to_copy.default


def _casts_parameter(operator: Any, args: Any) -> bool:
    """Whether the call is a cast as autocast makes them, which may find the result in
    its cache the next time."""
    return operator is _TO_COPY and isinstance(args[0], nn.Parameter)


def _num_bytes(value: Any) -> int:
    """-1 for what has no bytes of its own."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return -1
    return -1 if value.is_nested else value.nbytes


_COMPILED = "torch._functorch._aot_autograd.runtime_wrappers"


def _in_compiled_code() -> bool:
    if _COMPILED not in sys.modules:
        return False
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _COMPILED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _random_state(
    device: torch.device, kwargs: dict[str, Any]
) -> list[tuple[torch.Generator, Tensor]]:
    """Generators and their states, now that the operator has run."""
    generators = [torch.default_generator]
    # A captured region that draws numbers is refused (csrc/activation/forward_state.h).
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device.type != "cpu" and not captured:
        module = torch.get_device_module(device)
        generators.append(module.default_generators[device.index or 0])
    if (own := kwargs.get("generator")) is not None:
        generators.append(own)
    return [(generator, generator.get_state()) for generator in generators]
