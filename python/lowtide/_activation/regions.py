"""Checkpointed regions: one C++ region per module, and what their names came to."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves

from lowtide import _C
from lowtide._activation.interior import Recorder, Replayer
from lowtide._base import debugging
from lowtide._base.backward import PerBackward, in_backward
from lowtide._base.classes import class_name
from lowtide._base.memory import device_memory, pinned_cap
from lowtide.policies import INPUT, ActivationPolicy

# The attribute that a checkpointed module keeps its region in.
REGION = "_lowtide_region"


# Functions that are told of every name given without grad mode.
observers: list[Callable[[torch.Tensor, str], None]] = []

# Names that compiled code gave to values outside of any region in the same graph.
names_in_compiled_code: set[str] = set()
# How many values had a name in the latest compiled graph of a policy.
names_in_graphs: dict[ActivationPolicy, dict[str, int]] = {}
# Dynamo sees constants, and the same ones in all modules of a class and policy, so that
# they share a graph.
policies_by_key: dict[str, ActivationPolicy] = {}


@functools.cache
def book() -> _C.NameBook:
    """Which values carry which names."""
    return _C.NameBook()


@functools.cache
def transfers(device: torch.device) -> _C.Transfers:
    return _C.Transfers(device_memory(device), cap_bytes=pinned_cap())


class RegionState:
    """What :func:`lowtide.checkpoint` attaches to a module."""

    def __init__(self, module: nn.Module, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.module_name = class_name(module)
        self.region = self._make(type(module).__call__)
        self.names_checked = False  # after a backward

    def _make(self, call: Any) -> _C.Region:
        self.call = call  # the module's own
        # Runs the region as one compiled graph, once `compile` was called.
        self.compiled_call: Callable[..., Any] | None = None
        self.policy_key = repr(self.policy)
        policies_by_key[self.policy_key] = self.policy
        who = f"checkpoint({self.module_name})"
        return _C.Region(
            who=who,
            names=self.policy.treatments(),
            min_bytes=self.policy.min_bytes,
            prefetch=self.policy.prefetch,
            keep_last=self.policy.keep_last,
            book=book(),
            transfers_of=transfers,
            callbacks=_C.RegionCallbacks(
                call=_comparing(call, who) if debugging.enabled() else call,
                surroundings=_device_context,
                recorder=Recorder,
                replayer=Replayer,
                is_state=_is_state,
                device_of=device_of,
                first_backward=_check_after_backward,
            ),
        )

    def offload_all(self) -> bool:
        """Whether the policy kept on the device, of the last regions, what it offloads
        of others (``keep_last``); from the next forward on it does not."""
        if not self.policy.offload or not self.policy.keep_last:
            return False
        self.policy = dataclasses.replace(self.policy, keep_last=0)
        self.region = self._make(self.call)
        return True

    def treats_inside_a_graph(self) -> bool:
        """Whether a graph of this module alone can do all that the policy says, and
        more than a region around it."""
        policy = self.policy
        if not any(name != INPUT for name in (*policy.save, *policy.recompute)):
            return False
        return not policy.offload

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionState:
        copy = object.__new__(RegionState)
        copy.policy, copy.module_name = self.policy, self.module_name
        copy.names_checked = False
        copy.region = copy._make(self.call)
        return copy


def region_state(module: nn.Module) -> RegionState | None:
    return module.__dict__.get(REGION)


def regions(model: nn.Module) -> Iterator[tuple[str, RegionState]]:
    """(fully qualified name, state) of the checkpointed modules of ``model``."""
    for name, module in model.named_modules():
        if (state := region_state(module)) is not None:
            yield name, state


def attach(module: nn.Module, policy: ActivationPolicy) -> RegionState:
    state = RegionState(module, policy)
    module.__dict__[REGION] = state
    names_in_graphs.pop(policy, None)
    return state


def run_region(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call of a checkpointed module; in a graph ``compiled`` replaces it."""
    if hasattr(sys.modules.get(_TORCH_REMAT), "_active_save_op"):
        _require_same_hooks_again(module)
    if debugging.enabled():
        kwargs = kwargs | {_STORED: debugging.Stored(tree_leaves((args, kwargs)))}
    return module.__dict__[REGION].region.run(module, args, kwargs)


_TORCH_REMAT = "torch_remat._region"


def _require_same_hooks_again(module: nn.Module) -> None:
    """What torch_remat saves of a region of its own passes by the region around it in
    the first forward; in the second, which torch_remat does not know of, it does not,
    and every later saved tensor would be taken for another."""
    remat = sys.modules[_TORCH_REMAT]
    checkpointed = remat._state.get() is not None and torch.is_grad_enabled()
    if checkpointed and remat._active_save_op.get() is None:
        raise RuntimeError(
            f"lowtide: checkpoint({module.__dict__[REGION].module_name}): expected no "
            "torch_remat.checkpoint around it, got one. Checkpoint the module with one "
            "of the two: lowtide's around torch_remat's is fine."
        )


# The argument that a region of debugging keeps beside the others.
_STORED = "_lowtide_stored"


def _comparing(call: Callable[..., Any], who: str) -> Callable[..., Any]:
    """``call``, which requires the arguments of the first when it is made again."""

    def compared(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stored: debugging.Stored = kwargs.pop(_STORED)
        if in_backward():
            stored.require_same(tree_leaves((args, kwargs)), who, "argument")
        return call(module, *args, **kwargs)

    return compared


def _is_state(module: nn.Module, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(
        getattr(own, "_local_tensor", own).untyped_storage()._cdata == storage
        for own in itertools.chain(module.parameters(), module.buffers())
    )


def device_of(module: nn.Module) -> torch.device:
    for parameter in module.parameters():
        return parameter.device
    return torch.device("cpu")


def _device_context() -> contextlib.AbstractContextManager[Any] | None:
    """The innermost ``with torch.device(...)`` around the forward."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


# -- names of submodules' outputs ---------------------------------------------------


def submodules_named(module: nn.Module, pattern: str) -> list[nn.Module]:
    """Descendants whose name matches ``pattern``, read from ``module`` or from any
    module above it: in a block ``"layers.*.mlp"`` means ``"mlp"``."""
    parts = pattern.split(".")
    for start in range(len(parts)):
        suffix = ".".join(parts[start:])
        found = [m for name, m in _descendants(module) if fnmatchcase(name, suffix)]
        if found:
            _require_no_index(module, pattern, parts[:start])
            return found
    return []


def _require_no_index(module: nn.Module, pattern: str, above: list[str]) -> None:
    """What is above ``module`` is not looked at, so it must not choose among several
    of its kind."""
    for place, part in enumerate(above):
        if part.isdigit():
            below = pattern.split(".", place + 1)[-1]
            anywhere = ".".join([*above[:place], "*", below])
            raise ValueError(
                f"lowtide: checkpoint({class_name(module)}): expected '*' above the "
                f"module, got {part!r} in {pattern!r}, which would mean every "
                f"{class_name(module)} of this policy. Write {anywhere!r}, or give "
                "the one that is meant a policy of its own."
            )


def is_pattern(name: str) -> bool:
    return any(character in name for character in ".*?[")


def descendant_names(module: nn.Module) -> list[str]:
    return [name for name, _ in _descendants(module)]


def _descendants(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, descendant in module.named_modules():
        if name:
            yield name.replace("_orig_mod.", ""), descendant


def transfers_in_use(states: Iterable[RegionState]) -> _C.Transfers | None:
    for state in states:
        if (used := state.region.transfers) is not None:
            return used
    return None


# -- the check after the first backward ---------------------------------------------


_computed_again: PerBackward[dict[nn.Module, RegionState]] = PerBackward()


def _check_after_backward(module: nn.Module) -> bool:
    """Returns whether its names have been checked."""
    state = region_state(module)
    if not in_backward() or state is None:
        return False
    if not state.names_checked:
        _computed_again.get(dict, _check_modules)[module] = state
    return state.names_checked


def _check_modules(modules: dict[nn.Module, RegionState]) -> None:
    for state in modules.values():
        state.names_checked = True
    for problem in _problems(modules):
        raise ValueError(problem)


def problems(model: nn.Module) -> list[str]:
    """What the check after a backward would raise, of regions that have run."""
    ran = [
        module
        for module in model.modules()
        if (state := region_state(module)) and state.region.num_calls > 0
    ]
    return list(_problems(ran))


def _problems(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Listed names that came to nothing in all modules of their policy."""
    by_policy: dict[ActivationPolicy, list[nn.Module]] = {}
    for module in modules:
        state = region_state(module)
        if state is not None:
            by_policy.setdefault(state.policy, []).append(module)
    for policy, same in by_policy.items():
        yield from _policy_problems(policy, same)


def _policy_problems(
    policy: ActivationPolicy, modules: list[nn.Module]
) -> Iterator[str]:
    states = [state for module in modules if (state := region_state(module))]
    figures = [state.region.figures() for state in states]
    kind = ", ".join(sorted({state.module_name for state in states}))
    for name, treatment in policy.treatments().items():
        of_name = [each[name] for each in figures if name in each]
        who = f"ActivationPolicy.{treatment}"
        if name in names_in_graphs.get(policy, ()):
            continue
        if not any(each["matched"] for each in of_name):
            if name in names_in_compiled_code:
                yield (
                    f"lowtide: {who}: expected {name!r} to name a value in eager code "
                    f"of {kind}, got it inside compiled code, which the region around "
                    f"it can not see into. List {INPUT!r}, or compile the submodules; "
                    "save and recompute also work when compile() is called after "
                    "lowtide.checkpoint."
                )
                continue
            yield (
                f"lowtide: {who}: expected {name!r} to name a value in {kind}, got "
                f"none in {len(modules)} forward(s). {_advice(name, modules)}"
            )
            continue
        if treatment == "recompute":
            continue
        if not any(each["moved"] + each["shared"] + each["kept"] for each in of_name):
            reasons: dict[str, int] = {}
            for each in of_name:
                for reason, count in each["skipped"].items():
                    reasons[reason] = reasons.get(reason, 0) + count
            if set(reasons) == {_C.EMPTY_TENSOR}:
                continue
            text = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
            yield (
                f"lowtide: {who}: expected {name!r} to {treatment} something in "
                f"{kind}, got 0 bytes: {text}. Remove the name, or change the policy."
            )


def _advice(name: str, modules: Iterable[nn.Module]) -> str:
    known = {INPUT, *book().all()}
    for module in modules:
        known.update(descendant_names(module))
    if _TORCH_REMAT in sys.modules:
        return f"{nearest(name, known)} {_REGIONS_OF_TORCH_REMAT}"
    return nearest(name, known)


_REGIONS_OF_TORCH_REMAT = (
    "A call that torch_remat.region made before lowtide.checkpoint has no name: make "
    "it later, or name its result with lowtide.tag."
)


def nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {', '.join(map(repr, close))}?"
    return f"Known names: {', '.join(map(repr, known[:12]))}."
