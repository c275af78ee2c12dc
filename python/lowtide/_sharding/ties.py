"""Parameters that modules of several units share.

A tied parameter stays one parameter: every module that had it registers the same
shard. It can be gathered by one unit only, and that unit must be around all modules
that read it, so the first forward moves it to the innermost such unit: the root's, as
a rule. Its gradient is then complete when that unit's are.
"""

from torch import nn
from torch.distributed.tensor import DTensor

from lowtide._sharding.modules import managed_modules
from lowtide._sharding.owners import owner_of
from lowtide._sharding.parameter import UnitParameter
from lowtide._sharding.unit import UnitState


def move_shared_parameters(root: nn.Module, states: list[UnitState]) -> None:
    """Before the first forward of ``root``; ``states``: the units in it."""
    _join_slots(states)
    _drop_removed(root, states)
    managed_by = {
        module: state.first
        for state in states
        for module in managed_modules(state.modules)
    }
    for state in states:
        for parameter in list(state.parameters):
            modules = {module for module, _ in parameter.slots}
            _require_inside(root, parameter, modules)
            if {managed_by[module] for module in modules} != {state.first}:
                home = _innermost_around(modules, states)
                home = _over_its_mesh(parameter, state, home)
                if home is not state:
                    state.give_up(parameter)
                    home.take(parameter)


def _join_slots(states: list[UnitState]) -> None:
    """A weight that was tied after it had been sharded: what it was before goes."""
    new = _owners_of_new(states)
    for state in states:
        for parameter in list(state.parameters):
            registered = parameter.registered
            owner = owner_of(registered) or new.get(id(registered))
            if owner is not None and owner is not parameter:
                state.give_up(parameter)
                owner.slots.extend(parameter.slots)


def _owners_of_new(states: list[UnitState]) -> dict[int, UnitParameter]:
    """By the ids of parameters that no unit has seen yet, put in the place of shards:
    those of one weight each, as transformers loads and then ties it, become the shard
    of the one that is split over its mesh."""
    owners: dict[int, UnitParameter] = {}
    for state in states:
        for parameter in state.parameters:
            registered = parameter.registered
            if owner_of(registered) is None and isinstance(registered, DTensor):
                if registered.device_mesh == parameter.spec.mesh:
                    owners.setdefault(id(registered), parameter)
    return owners


def _drop_removed(root: nn.Module, states: list[UnitState]) -> None:
    """Parameters of modules that have been taken out since, as a head is that another
    replaces. A parameter that one of them shared stays with the others."""
    inside = set(root.modules())
    for state in states:
        for parameter in list(state.parameters):
            if not any(module in inside for module, _ in parameter.slots):
                state.give_up(parameter)


def _innermost_around(modules: set[nn.Module], states: list[UnitState]) -> UnitState:
    around = [
        (len(below), number)
        for number, state in enumerate(states)
        if len(state.modules) == 1
        and modules <= (below := set(state.modules[0].modules()))
    ]
    return states[min(around)[1]]


def _over_its_mesh(
    parameter: UnitParameter, state: UnitState, home: UnitState
) -> UnitState:
    """Of the units of ``home``'s call that over the mesh which ``state`` has split it
    over."""
    for unit in home.together:
        if unit.mesh == state.mesh:
            return unit
    raise ValueError(
        f"lowtide: {parameter.name}: expected modules that share a weight to be "
        f"sharded over one mesh, got it sharded over {state.mesh}, and the unit around "
        f"them, '{home.name}', over {home.mesh}. Pass the same mesh for both."
    )


def _require_inside(
    root: nn.Module, parameter: UnitParameter, modules: set[nn.Module]
) -> None:
    inside = set(root.modules())
    outside = [type(module).__name__ for module in modules if module not in inside]
    if outside:
        raise ValueError(
            f"lowtide: {parameter.name}: expected a parameter that is tied within "
            f"{type(root).__name__}, got one that {outside[0]} outside of it shares. "
            "Run forward through a module that contains both."
        )
