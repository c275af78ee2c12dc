"""``lowtide.sleep`` and ``lowtide.wake``: a model's memory on the device, lent to
another program between two steps."""

import functools
import itertools
import weakref
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide import _C
from lowtide._base.backward import in_backward
from lowtide._base.memory import device_memory, pinned_cap
from lowtide._sharding.device_steps import device_steps_of
from lowtide._sharding.local_parameter import sharded_of
from lowtide._sharding.unit import unit_state, units_of

__all__ = ["PARTS", "Part", "sleep", "wake"]

Part = Literal["parameters", "gradients", "states"]
PARTS: tuple[Part, ...] = get_args(Part)

_Named = tuple[str, Tensor]
_Holder = nn.Module | Optimizer


@functools.cache
def host_pool(device: torch.device) -> _C.PinnedPool:
    """What sleeps waits in it; kept for the next time."""
    return _C.PinnedPool(
        device_memory(device), cap_bytes=pinned_cap(), holds="models that sleep"
    )


# What sleeps, by whose it is.
_asleep: "weakref.WeakKeyDictionary[_Holder, dict[Part, list[_C.SleepingBytes]]]"
_asleep = weakref.WeakKeyDictionary()
# What tensor subclasses that sleep are made of, by name; asked meanwhile, some read it.
# No others, nor those that are awake while another part sleeps: Module.to swaps no
# parameters that have a weak reference.
_inner: MutableMapping[Tensor, list[str]] = WeakTensorKeyDictionary()
_falling_asleep = False
_guard: RemovableHandle | None = None  # of optimizers' steps, while anything sleeps


def sleep(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    parts: Iterable[Part] = PARTS,
    drop: Iterable[Part] = (),
) -> None:
    """Gives back what ``model`` and ``optimizer`` have on the device, between two steps
    and on every rank: gathered parameters are dropped; shards, buffers, gradients
    (those too that microbatches without sync have left) and states are copied to
    page-locked host memory, by a stream of lowtide's, and their bytes go back to the
    device. Returns when they have.

    All tensors stay the objects they are: parameters, their views, what optimizers and
    state dicts hold. Whoever reads or writes one meanwhile raises, naming it, and so do
    a forward, an optimizer's step and a backward that adds to gradients asleep, which
    drops the step as any exception in it does. What is not on the model's device stays,
    and so do communicators and what the program holds beside model and optimizer.

    Args:
        model: Sharded by lowtide or not.
        parts: Of ``"parameters"`` (and buffers), ``"gradients"`` and ``"states"``, the
            optimizer's. What sleeps already stays asleep.
        drop: Those of ``parts`` that are not copied but given up, buffers excepted:
            what will be given anew. Until then whoever reads or writes them raises, and
            so does a step: parameters and states come back by ``wake(refill=...)``;
            gradients go by ``zero_grad()``, states also by
            ``optimizer.load_state_dict``.

    Raises:
        ValueError: For a tensor whose bytes neither torch nor lowtide allocated, or
            another process has.
        RuntimeError: In backward, in the capture of a CUDA graph, and where the host
            has no memory.
        The part that raised and those behind it are awake.
    """
    global _falling_asleep
    optimizers, parts = _checked("sleep", optimizer, parts)
    _, dropped = _checked("sleep", (), drop, "drop")
    if beside := [part for part in dropped if part not in parts]:
        raise ValueError(
            f"lowtide: sleep: expected drop among parts ({', '.join(parts)}), got "
            f"{', '.join(beside)}. Name them in parts, too."
        )
    device = _device_of(model)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # copies of a save, say
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = unit_state(module)
            if state is None:  # torch's own
                module.reshard()
                continue
            together = [unit.settings for unit in state.together]
            kept = [settings.keep_unsharded_storage for settings in together]
            for settings in together:
                settings.keep_unsharded_storage = False
            module.reshard()
            for settings, keeps in zip(together, kept, strict=True):
                settings.keep_unsharded_storage = keeps
    _falling_asleep = True
    try:
        for holder, part, tensors in _parts_of(model, optimizers, parts):
            if part not in dropped:
                _put(holder, part, tensors, device, host_pool(device))
                continue
            if part == "parameters":  # and no buffers: some are in no checkpoint
                _put(holder, part, _buffers(model), device, host_pool(device))
            _put(holder, part, tensors, device, None)
    finally:
        _falling_asleep = False
        _guard_steps()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def wake(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    parts: Iterable[Part] = PARTS,
    refill: Callable[[], object] | None = None,
) -> None:
    """Brings back, bit for bit, what :func:`sleep` has given away of ``model`` and
    ``optimizer``: the same tensors and views, at other addresses. What nobody holds any
    more, as gradients after ``zero_grad()``, does not come back. Call it on every rank;
    nothing happens where nothing sleeps. A CUDA graph that the program has captured has
    the old addresses: capture it again.

    Args:
        parts: As in :func:`sleep`; the others sleep on. ``("parameters",)`` is enough
            for a forward without grad, or to hand weights on.
        refill: Called with all of ``parts`` awake to write every parameter and state
            that :func:`sleep` has dropped, in place
            (``lambda: model.load_state_dict(...)``). Without it they stay dropped.

    Raises:
        ValueError: For what ``refill`` has not written: all is dropped again, as it is
            where ``refill`` raises.
        torch.OutOfMemoryError: Where the device has no memory for a part; it sleeps
            on, and may be woken when there is some.
        RuntimeError: In backward, and in the capture of a CUDA graph.
    """
    optimizers, parts = _checked("wake", optimizer, parts)
    empty: list[tuple[_Holder, Part, list[_Named]]] = []
    for holder, part, tensors in _parts_of(model, optimizers, parts):
        named = list(tensors)
        for owner, sleeping in list(_asleep.items()):
            for each in list(sleeping.get(part, ())):
                held = [leaf for leaf in named if each.holds(leaf[1])]
                if owner is not holder and not held:
                    continue
                if each.dropped and held:
                    if refill is None or part == "gradients":
                        continue
                    empty.append((owner, part, held))
                if held or not each.dropped:
                    each.wake()
                sleeping[part].remove(each)
            if not any(sleeping.values()):
                del _asleep[owner]
    if refill is not None:
        _refill(refill, empty, _device_of(model))
    _guard_steps()


def _put(
    holder: _Holder,
    part: Part,
    tensors: Iterable[_Named],
    device: torch.device,
    host: _C.PinnedPool | None,
) -> None:
    sleeping = _C.SleepingBytes(list(tensors), device_memory(device), host)
    if sleeping.bytes > 0:
        _asleep.setdefault(holder, {}).setdefault(part, []).append(sleeping)


def _checked(
    who: str,
    optimizer: Optimizer | Sequence[Optimizer],
    parts: Iterable[Part],
    argument: str = "parts",
) -> tuple[list[Optimizer], list[Part]]:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    parts = [parts] if isinstance(parts, str) else [*parts]  # type: ignore[list-item]
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(
            f"lowtide: {who}: expected {argument} of {', '.join(PARTS)}, got "
            f"{', '.join(map(repr, unknown))}. Leave {argument} out for "
            f"{'all' if argument == 'parts' else 'none'}."
        )
    if in_backward():
        raise RuntimeError(
            f"lowtide: {who}: expected no backward that runs, got one. Call it between "
            "two steps, or two microbatches."
        )
    return optimizers, [part for part in PARTS if part in parts]


# -- what there is of a model ---------------------------------------------------------


def _device_of(model: nn.Module) -> torch.device:
    """The units', or where the first parameter of a model without any is."""
    for state in units_of(model.modules()):
        return state.device
    devices = (leaf.device for p in model.parameters() for _, leaf in _leaves("", p))
    return next(devices, torch.device("cpu"))


def _parts_of(
    model: nn.Module, optimizers: list[Optimizer], parts: list[Part]
) -> Iterator[tuple[_Holder, Part, Iterator[_Named]]]:
    if "parameters" in parts:
        yield model, "parameters", _parameters(model)
    if "gradients" in parts:
        yield model, "gradients", _gradients(model)
    if "states" in parts:
        names = {id(p): name for name, p in model.named_parameters()}
        for optimizer in optimizers:
            steps = device_steps_of(optimizer)
            if steps is None or not steps.states_on_host:
                yield optimizer, "states", _states(optimizer, names)


def _parameters(model: nn.Module) -> Iterator[_Named]:
    for name, parameter in model.named_parameters():
        yield from _leaves(name, parameter)
    yield from _buffers(model)


def _buffers(model: nn.Module) -> Iterator[_Named]:
    for name, buffer in model.named_buffers():
        yield from _leaves(name, buffer)


def _gradients(model: nn.Module) -> Iterator[_Named]:
    for name, p in model.named_parameters():
        yield from _leaves(f"{name}.grad", p.grad)
    for state in units_of(model.modules()):
        for parameter in state.parameters:
            if parameter.full is not None:  # where schedules of pipelines leave them
                yield from _leaves(f"{parameter.name}.grad", parameter.full.grad)
        if state.unit is not None:
            for buffer in state.unit.waiting_buffers:
                yield f"gradients of unit '{state.name}' between microbatches", buffer


def _states(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[_Named]:
    for number, (p, state) in enumerate(optimizer.state.items()):
        of = names.get(id(sharded_of(p)), f"parameter {number}")
        if isinstance(state, Mapping):
            for key, value in state.items():
                yield from _leaves(f"state '{key}' of {of}", value)
        else:
            yield from _leaves(f"state of {of}", state)


def _leaves(name: str, value: Any) -> Iterator[_Named]:
    """The plain tensors in it, also those that tensor subclasses are made of."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(name, each)
    elif isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            names = _inner.get(value) or value.__tensor_flatten__()[0]
            if _falling_asleep:
                _inner[value] = names
            for inner in names:
                yield from _leaves(name, getattr(value, inner))
        else:
            yield name, value


# -- what was dropped -----------------------------------------------------------------

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _refill(
    refill: Callable[[], object],
    empty: list[tuple[_Holder, Part, list[_Named]]],
    device: torch.device,
) -> None:
    named = [leaf for _, _, leaves in empty for leaf in leaves]
    try:
        for _, leaf in named:
            _words(leaf).bitwise_not_()  # of zeros; see _require_written
        refill()
        for name, leaf in named:
            _require_written(name, leaf)
    except BaseException:
        for holder, part, leaves in empty:
            _put(holder, part, leaves, device, None)
        _guard_steps()
        raise


def _require_written(name: str, leaf: Tensor) -> None:
    words = _words(leaf)
    left = words.eq(words.new_full((), 0).bitwise_not())
    # -1 and True are like any number; this nan is nobody's. Dry, both read as False.
    numbers = leaf.is_floating_point() or leaf.is_complex()
    if words.numel() > 0 and (left.any() if numbers else left.all()):
        raise ValueError(
            f"lowtide: wake: expected refill to write all of what was dropped, got "
            f"{int(left.sum())} of {words.numel()} elements of {name} as they were. "
            "Load them, too, or do not drop their part."
        )


def _words(leaf: Tensor) -> Tensor:
    """The elements' bits."""
    leaf = leaf.detach()
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    return leaf.view(_WORDS[leaf.element_size()])


# -- optimizers' steps ----------------------------------------------------------------


def _guard_steps() -> None:
    """While anything sleeps: a step would count itself, say, before it reads that."""
    global _guard
    if _asleep and _guard is None:
        _guard = register_optimizer_step_pre_hook(_require_awake)
        # Ahead of others, which look at what a step would read.
        _global_optimizer_pre_hooks.move_to_end(_guard.id, last=False)
    elif not _asleep and _guard is not None:
        _guard.remove()
        _guard = None
    sleeping = _sleeping()
    for value in list(_inner):
        if not any(_holding(leaf, sleeping) for _, leaf in _leaves("", value)):
            del _inner[value]


def _sleeping() -> list[_C.SleepingBytes]:
    return [
        each for parts in _asleep.values() for part in parts.values() for each in part
    ]


def _holding(leaf: Tensor, sleeping: list[_C.SleepingBytes]) -> list[_C.SleepingBytes]:
    return [each for each in sleeping if each.holds(leaf)]


def _require_awake(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    sleeping = _sleeping()
    parameters = [sharded_of(p) for g in optimizer.param_groups for p in g["params"]]
    for name, leaf in itertools.chain(
        *(_leaves("a parameter", p) for p in parameters),
        *(_leaves("a gradient", p.grad) for p in parameters),
        _states(optimizer, {}),
    ):
        if holding := _holding(leaf, sleeping):
            state, call = "sleeps", "lowtide.wake(model, optimizer)"
            if holding[0].dropped:
                state = "was dropped"
                call = f"{call[:-1]}, refill=...), or zero_grad() for gradients,"
            raise RuntimeError(
                f"lowtide: {type(optimizer).__name__}: expected a model and states "
                f"that are awake for a step, got {name} that {state}. Call {call} on "
                "every rank first."
            )
