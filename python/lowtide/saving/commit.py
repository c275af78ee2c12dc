"""How what was read becomes the model's: in place, and undone where any rank fails.

A change keeps what it replaces, in host memory that the new value has left, until all
ranks have made all of theirs.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide._sharding.local_parameter import rows_of
from lowtide._sharding.neighbours import lay_side_by_side
from lowtide._sharding.root import before_first_forward
from lowtide._sharding.subclass import plain_tensors
from lowtide._sharding.unit import units_of
from lowtide.api import abort_step
from lowtide.saving import content
from lowtide.saving.content import Live
from lowtide.saving.errors import CheckpointError
from lowtide.saving.staging import Staged
from lowtide.saving.verification import Opened

_MISSING = object()
_EXTRA_STATE = "_extra_state"  # what a module's get_extra_state gives


class Change(abc.ABC):
    @abc.abstractmethod
    def make(self) -> None: ...

    @abc.abstractmethod
    def undo(self) -> None:
        """Also of one that was interrupted, or never made."""


class Write(Change):
    """Into a tensor that stays where it is."""

    def __init__(self, into: Tensor, value: Tensor) -> None:
        self._into, self._value = into, value
        self._old: list[tuple[Tensor, Tensor]] = []

    def make(self) -> None:
        # Not every subclass can be copied as a whole.
        plain = plain_tensors(self._into)
        self._old = [(each, each.to("cpu", copy=True)) for each in plain]
        self._into.copy_(self._value)
        del self._value

    def undo(self) -> None:
        for into, old in self._old:
            into.copy_(old)


class Put(Change):
    """A value for a key."""

    def __init__(self, into: dict[Any, Any], key: Any, value: Any) -> None:
        self._into, self._key, self._value = into, key, value
        self._old = into.get(key, _MISSING)

    def make(self) -> None:
        self._into[self._key] = self._value

    def undo(self) -> None:
        if self._old is not _MISSING:
            self._into[self._key] = self._old
        else:
            self._into.pop(self._key, None)


class Call(Change):
    """For what is set by a call."""

    def __init__(self, function: Callable[[Any], Any], value: Any, old: Any) -> None:
        self._function, self._value, self._old = function, value, old

    def make(self) -> None:
        self._function(self._value)

    def undo(self) -> None:
        self._function(self._old)


def changes(staged: Staged, opened: Opened, of: Live) -> list[Change]:
    """Everything, in order, with whatever needs memory of the device already made.
    Raises CheckpointError for what does not fit."""
    made = _of_model(staged, opened, of)
    if of.optimizers:
        made += _of_optimizers(staged, opened, of)
    if staged.generators:
        states = {k: staged.value(name) for k, name in staged.generators.items()}
        made.append(
            Call(
                lambda states: content.set_generators(states, of.device),
                states,
                content.generators(of.device),
            )
        )
    return made


def replace_step(staged: Staged, opened: Opened, of: Live) -> Callable[[], None]:
    """What is to be done last: the step that is under way is dropped, with its
    gradients, and those of the checkpoint come. Can not be undone."""
    layouts = {
        name: staged.value(saved)
        for name, saved in staged.waiting.get("layout", {}).items()
    }
    units = list(of.units()) if layouts else []
    here = {name: parameter for _, _, parameter, name in units}
    for name, saved in layouts.items():
        got = content.layout(here[name]) if name in here else "no unit's"
        if got != saved:
            where = opened.where(staged.waiting["layout"][name])
            raise CheckpointError(
                f"lowtide: load: {where}: expected gradients between two reductions "
                f"to come back to the mesh and placements {saved}, got {got}. Shard "
                "the model as it was, or load an older checkpoint."
            )

    gradients = _of_gradients(staged, of)

    def replace() -> None:
        abort_step(of.model)
        for change in gradients:
            change.make()
        if not layouts:
            return
        for state in units_of(of.model.modules()):
            # What the first forward chooses for a unit is chosen without gradients.
            if state.root is None:
                before_first_forward(state)
        for state, i, _, name in units:
            if name in layouts:
                unreduced, partial = (
                    staged.value(n).to(state.device) if n is not None else None
                    for kind in content.KINDS
                    for n in [staged.waiting.get(kind, {}).get(name)]
                )
                accumulating = staged.value(staged.waiting["accumulating"][name])
                state.materialized().bring_back_gradient(
                    i, accumulating, unreduced, partial
                )

    return replace


def _of_model(staged: Staged, opened: Opened, of: Live) -> list[Change]:
    own = set().union(*map(_storages, (*of.model.parameters(), *of.model.buffers())))
    made: list[Change] = []
    objects, old = {}, {}
    for key, names in staged.objects.items():
        value = staged.nested(opened, names)
        for part in filter(None, staged.placement.model.split(".")):
            value = value[part]
        objects[key], old[key] = value[key], of.state[key]
    for key, name in staged.model.items():
        live, value = of.state[key], staged.value(name)
        if key.endswith(_EXTRA_STATE):
            objects[key], old[key] = value, live
            continue
        into = rows_of(live)
        if into.is_meta:
            raise CheckpointError(
                f"lowtide: load: {key}: expected a tensor with storage, got one on the "
                "meta device. Call model.to_empty(device=...) first."
            )
        if into.numel() and not _storages(into) <= own:
            raise CheckpointError(
                f"lowtide: load: {key}: expected state_dict() to return the model's "
                "own tensor, got a copy, which a hook has made. Remove the hook, or "
                "load with torch.distributed.checkpoint."
            )
        made.append(Write(into, rows_of(value)))
        if key in of.parameters:
            made += _of_derived(rows_of(of.parameters[key]), into)
    if objects:  # of get_extra_state
        made.append(
            Call(lambda of_: of.model.load_state_dict(of_, strict=False), objects, old)
        )
    return made


def _of_derived(parameter: Tensor, saved: Tensor) -> list[Change]:
    """What a subclass has computed from its values and does not save: torchao's scales
    of float8, which would stay those of the old ones."""
    if not is_traceable_wrapper_subclass(parameter):
        return []
    names = set(parameter.__tensor_flatten__()[0]) - set(saved.__tensor_flatten__()[0])
    attributes = vars(parameter)
    return [Put(attributes, name, getattr(saved, name)) for name in sorted(names)]


def _storages(tensor: Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in plain_tensors(rows_of(tensor))}


def _of_optimizers(staged: Staged, opened: Opened, of: Live) -> list[Change]:
    made: list[Change] = []
    names = of.names()
    number = 0
    for optimizer in of.optimizers:
        _require_plain(optimizer)
        for group in optimizer.param_groups:
            here = [names[id(p)] for p in group["params"]]
            made += _of_group(staged, opened, optimizer, group, number, here)
            number += 1
            new: dict[Any, dict[str, Any]] = {}
            for p, name in zip(group["params"], here, strict=True):
                new[p] = {}
                made += _of_state(staged, optimizer, group, p, name, new[p])
            if not any(p in optimizer.state for p in new):
                lay_side_by_side(group["params"], new)
    saved = {group for group in staged.groups if group.isdigit()}
    if saved and len(saved) != number:
        raise CheckpointError(
            f"lowtide: load: {opened.folder}: expected {number} parameter groups, got "
            f"{len(saved)}. Pass the optimizer that was saved."
        )
    return made


def _of_group(
    staged: Staged,
    opened: Opened,
    optimizer: Optimizer,
    group: dict[str, Any],
    number: int,
    here: list[str],
) -> list[Change]:
    keys = [str(number), *here]  # the second: torch's flattened form
    saved = next((staged.groups[key] for key in keys if key in staged.groups), {})
    lacks = sorted(set(optimizer.defaults) - set(saved))
    if lacks:
        raise CheckpointError(
            f"lowtide: load: {opened.folder}: parameter group {number}: expected "
            f"{type(optimizer).__name__}'s {', '.join(lacks)}, got "
            f"{', '.join(sorted(set(saved) - {'params'})) or 'none'}. Pass the "
            "optimizer that was saved."
        )
    if "params" in saved and set(staged.value(saved["params"])) != set(here):
        differ = sorted(set(staged.value(saved["params"])) ^ set(here))
        raise CheckpointError(
            f"lowtide: load: {opened.where(saved['params'])}: expected the parameters "
            f"of group {number}, got others: '{differ[0]}' is in one alone. Pass the "
            "optimizer that was saved."
        )
    made: list[Change] = []
    for key, name in saved.items():
        value, live = staged.value(name), group.get(key)
        if isinstance(live, Tensor) and isinstance(value, Tensor):
            made.append(Write(live, value))
        elif key != "params":
            made.append(Put(group, key, value))
    return made


def _of_state(
    staged: Staged,
    optimizer: Optimizer,
    group: dict[str, Any],
    p: Any,
    name: str,
    new: dict[str, Any],
) -> list[Change]:
    """``new`` is filled with it."""
    made: list[Change] = []
    live = optimizer.state.get(p, {})
    for path, saved in staged.state.get(name, {}).items():
        value, old, into = staged.value(saved), live, new
        for part in path[:-1]:
            into = into.setdefault(part, {})
        for part in path:
            old = old.get(part) if isinstance(old, Mapping) else None
        if isinstance(value, Tensor):
            if isinstance(old, Tensor):
                made.append(Write(rows_of(old), rows_of(value)))
                value = old
            else:
                value = _on_device(value, p, group, path[-1])
        into[path[-1]] = value
    if new or live:
        made.append(Put(optimizer.state, p, new))
    return made


def _on_device(value: Tensor, p: Any, group: dict[str, Any], key: str) -> Tensor:
    """As `Optimizer.load_state_dict` does: steps are counted on the host, unless the
    optimizer's kernels read them."""
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    if on_host:
        return value
    moved = rows_of(value).to(rows_of(p).device)
    if isinstance(value, DTensor):
        return DTensor(moved, value._spec, requires_grad=False)
    return moved


def _of_gradients(staged: Staged, of: Live) -> list[Change]:
    made: list[Change] = []
    for name, p in of.parameters.items():
        saved = staged.gradients.get(name)
        value = None
        if saved is not None:
            value = _on_device(staged.value(saved), p, {}, "grad")
        made.append(Call(_set_gradient_of(p), value, p.grad))
    return made


def _set_gradient_of(p: nn.Parameter) -> Callable[[Tensor | None], None]:
    def set_gradient(value: Tensor | None) -> None:
        p.grad = value

    return set_gradient


def _require_plain(optimizer: Optimizer) -> None:
    own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    if own or optimizer._optimizer_load_state_dict_pre_hooks:
        raise CheckpointError(
            f"lowtide: load: {type(optimizer).__name__}: expected an optimizer whose "
            "state is torch.optim.Optimizer's, got one that loads in a way of its own. "
            "Load the model with optimizer=None, and the optimizer by its own means."
        )
