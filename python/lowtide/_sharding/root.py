"""The first forward: which units are in the tree, what they are called, and whether
all ranks agree."""

import sys
import weakref

import torch
from torch import nn

from lowtide import _C
from lowtide._base import replay_log
from lowtide._base.classes import class_name, original_class
from lowtide._base.memory import device_memory
from lowtide._sharding.agreement import require_agreement
from lowtide._sharding.connected import channel_of_all
from lowtide._sharding.embedding import only_looks_up
from lowtide._sharding.extension import agree
from lowtide._sharding.late import warn_of_additions
from lowtide._sharding.misread import explain_errors
from lowtide._sharding.optimizers import watch_optimizers
from lowtide._sharding.replay import log_root
from lowtide._sharding.ties import move_shared_parameters
from lowtide._sharding.unit import UnitState, units_of


def before_first_forward(state: UnitState) -> None:
    """Looks at a unit that has no root yet, or in whose modules something was
    registered."""
    state = state.first
    if state.root is not None:
        warn_of_additions(state)
    elif "torch._dynamo" in sys.modules:  # the root's own forward may be compiled
        torch.compiler.disable(build_root)(state)
    else:
        build_root(state)


def build_root(state: UnitState) -> None:
    """Makes ``state``'s module the root of every unit below it: before the first
    forward, and before the next one after a unit has been made anew. The first unit to
    run forward becomes the root, as in FSDP2. Collective: compares the units with
    the other ranks' before anything is gathered."""
    if len(state.modules) > 1:
        raise RuntimeError(
            f"lowtide: unit '{state.name}': expected one root module, got "
            f"{len(state.modules)} modules sharded together. Call fully_shard on "
            "the module that contains them too, and run its forward first."
        )
    root_module = state.modules[0]
    states = units_of(root_module.modules())
    for other in states:
        if other.root is not None:
            raise RuntimeError(
                f"lowtide: unit '{other.name}': expected to run inside "
                f"'{class_name(root_module)}', got a forward of its own before "
                "that of its root. Run forward through the root module first."
            )
    move_shared_parameters(root_module, states)
    _name(root_module, states)
    for other in states:
        if other is other.first:
            warn_of_additions(other)
    for other in states:
        other.settings.encloses_units = _encloses(other, states)
        other.settings.leaf_module = _is_leaf(other)
    if state.auto_reshard:
        # Backward needs the root's own parameters right after forward.
        for other in state.together:
            other.settings.reshard_after_forward = False
    units = [other.materialized() for other in states]
    for other, unit in zip(states, units, strict=True):
        unit.rename(other.name, [p.name for p in other.parameters])
        beside = [one.unit for one in other.together if one is not other and one.unit]
        other.settings.stand_beside(beside)
    for other in states:
        other.require_extensions()
        other.choose_rows()
        other.choose_fused()
    require_agreement(states)
    agree([other.extensions for other in states if other.extensions is not None])
    root = _C.Root(class_name(root_module), device_memory(state.device))
    root.adopt(units, channel_of_all(states))
    for other in states:
        other.root = root
        other.tree = [weakref.ref(state) for state in states]
        other.apply_prefetch()
    watch_optimizers(states)
    if replay_log.enabled():
        log_root(state, states)
    if not state.explains_errors:
        state.explains_errors = True
        explain_errors(state)
    if state.device.type != "cpu":
        state.hooks.move_inputs_to(state.device)


def _name(root: nn.Module, states: list[UnitState]) -> None:
    """Fully qualified names, for errors, traces and the ledger."""
    module_names = {module: name for name, module in root.named_modules()}
    for state in states:
        paths = [module_names[module] for module in state.modules]
        name = ", ".join(path or class_name(root) for path in paths)
        state.name = name + state.over
        for parameter in state.parameters:
            module, name = parameter.slots[0]
            path = module_names[module]
            parameter.name = f"{path}.{name}" if path else name


def _encloses(state: UnitState, states: list[UnitState]) -> bool:
    below = {m for module in state.modules for m in module.modules()}
    others = [other for other in states if other.first is not state.first]
    return any(module in below for other in others for module in other.modules)


def _is_leaf(state: UnitState) -> bool:
    """One module of torch's, or an embedding of the program's own class: what its
    forward reads in backward autograd has saved."""
    unknown = any(p.parallel or p.extended for p in state.parameters)
    if len(state.modules) != 1 or len(state.together) != 1 or unknown:
        return False
    module = state.modules[0]
    original = original_class(module)
    if isinstance(module, nn.Embedding):
        return only_looks_up(module, original)
    # A forward of the user's may checkpoint the module's own.
    own_forward = "forward" not in module.__dict__
    of_torch = original.__module__.startswith("torch.nn.")
    return of_torch and own_forward and not any(module.children())
