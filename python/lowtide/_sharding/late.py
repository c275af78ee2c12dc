"""What comes to a unit's modules after `fully_shard`, which nobody gathers or reduces.

Torch tells whoever asks when a parameter or a module is registered, so steps pay
nothing: a unit looks again before its next forward.
"""

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lowtide._sharding.modules import managed_modules
from lowtide._sharding.owners import sharded_places
from lowtide._sharding.unit import UnitState

_unit_of: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[UnitState]]" = (
    weakref.WeakKeyDictionary()
)


def watch(state: UnitState) -> None:
    """Notices what is registered in the unit's modules from now on."""
    if not _unit_of:
        register_module_parameter_registration_hook(_registered)
        register_module_module_registration_hook(_registered)
    unit = weakref.ref(state)
    for module in managed_modules(state.modules):
        _unit_of[module] = unit


def _registered(module: nn.Module, name: str, value: Any) -> None:
    # Where torch.compile traces it a container is made, such as a slice of a
    # ModuleList; what it reads here it would guard, and modules come and go.
    if torch.compiler.is_compiling():
        return
    unit = _unit_of.get(module)
    if unit is None or (state := unit()) is None:
        return
    state.hooks.look_again()
    if isinstance(value, nn.Module):
        for inside in value.modules():
            _unit_of.setdefault(inside, unit)


def warn_of_additions(state: UnitState) -> None:
    """FSDP2 leaves them to the rank, too, and says nothing."""
    known = sharded_places()
    managed = set(managed_modules(state.modules))
    added = [
        f"{path}.{name}" if path else name
        for top in state.modules
        for path, module in top.named_modules()
        if module in managed
        for name, parameter in module._parameters.items()
        if parameter is not None
        and parameter.requires_grad
        and (module, name) not in known
        and id(parameter) not in state.ignored
    ]
    if added:
        warnings.warn(
            f"lowtide: unit '{state.name}': expected the parameters that fully_shard "
            f"found, got {', '.join(added)} since. As in FSDP2, every rank trains its "
            "own: nothing shards it or reduces its gradient. Call fully_shard on the "
            "module that has it, or pass it in ignored_params.",
            stacklevel=2,
        )
        state.ignored |= {
            id(parameter) for module in managed for parameter in module.parameters()
        }
