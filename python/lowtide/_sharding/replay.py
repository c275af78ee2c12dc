"""What a root's units and its optimizers do, for the replay log."""

import functools
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from lowtide._base import replay_log
from lowtide._base.backward import in_backward
from lowtide._base.debugging import digest
from lowtide._sharding.unit import UnitState

_roots: "weakref.WeakSet[UnitState]" = weakref.WeakSet()
_watched: "weakref.WeakSet[UnitState]" = weakref.WeakSet()
_steps = 0
_seen: Counter[str] = Counter()  # forwards since the last step, by unit


def log_root(root: UnitState, units: list[UnitState]) -> None:
    """From its first forward on."""
    for unit in units:
        if unit in _watched:  # of a root that was made anew
            continue
        _watched.add(unit)
        replay_log.write(f"unit {unit.name}: {len(unit.parameters)} parameters")
        for module in unit.modules:
            hook = functools.partial(_after_forward, weakref.ref(unit))
            module.register_forward_hook(hook)
    _roots.add(root)
    _register_once()


def _after_forward(
    reference: "weakref.ref[UnitState]", module: nn.Module, args: Any, output: Any
) -> None:
    unit = reference()
    if unit is None or torch.compiler.is_compiling():
        return
    _seen[unit.name] += 1
    if in_backward():
        how = "again"
    else:
        how = "with" if torch.is_grad_enabled() else "without"
        how += " gradients"
    replay_log.write(
        f"forward of {unit.name} {how}: {_digests(args)} -> {_digests(output)}"
    )
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not in_backward():
            leaf.register_hook(functools.partial(_gradient_came, unit.name))


def _gradient_came(name: str, gradient: Tensor) -> None:
    replay_log.write(f"backward of {name}: {digest(gradient)}")


def _digests(values: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return " ".join(map(digest, tensors)) or "no tensor"


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    global _steps
    _steps += 1
    replay_log.write(f"step {_steps} of {type(optimizer).__name__}")
    for unit in _units():
        for parameter in unit.parameters:
            gradient = parameter.shard.grad
            seen = "none" if gradient is None else digest(gradient)
            replay_log.write(f"gradient of {parameter.name}: {seen}")
    for unit in _units():
        if unit.root is not None and unit.unit is not None:
            calls = unit.root.calls_of(unit.unit)
            replay_log.write(f"calls until now of {unit.name}: {_text(calls)}")
        if not _seen[unit.name]:
            replay_log.write(f"no forward of {unit.name} was seen: none, or compiled")
    _seen.clear()
    for name, counted in _calls().items():
        replay_log.write(f"calls until now, {name}: {counted}")


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for unit in _units():
        for parameter in unit.parameters:
            seen = digest(parameter.shard)
            replay_log.write(f"parameter {parameter.name}: {seen}")


def _units() -> list[UnitState]:
    trees = [root.tree for root in sorted(_roots, key=lambda root: root.name)]
    return [unit for tree in trees for one in tree if (unit := one()) is not None]


def _text(calls: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(calls.items()))


def _calls() -> dict[str, str]:
    """Of the communicators of all units, by what they are for."""
    found: dict[str, str] = {}
    for unit in _units():
        groups = unit.groups
        for name, group in (("gather", groups.gather), ("reduce", groups.reduce)):
            counts = [
                f"{kind} {calls} times, {size} bytes"
                for kind, (calls, size) in group.counters.items()
                if calls
            ]
            found[name] = "; ".join(counts) or "none"
    return found
