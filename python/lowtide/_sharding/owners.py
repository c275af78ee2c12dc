"""Which parameter of a unit a tensor is the shard of, or was before it was sharded or
replaced."""

import weakref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lowtide._sharding.parameter import UnitParameter

# What parameters became, by the parameters as they were before sharding.
_became: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Owners by the id of their shard: a weak reference to the shard itself would do, but
# `Module._apply` refuses to swap a tensor that has one.
_by_shard: "weakref.WeakValueDictionary[int, UnitParameter]" = (
    weakref.WeakValueDictionary()
)
# Owners of parameters that are registered nowhere any more: they have other shards.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_num_replacements = 0


def remember_original(parameter: nn.Parameter, became: UnitParameter) -> None:
    _became[parameter] = weakref.ref(became)


def remember_replaced(shard: nn.Parameter, owner: UnitParameter) -> None:
    """``owner`` has got another shard."""
    global _num_replacements
    _replaced[shard] = weakref.ref(owner)
    _num_replacements += 1


def replacements() -> int:
    """How many shards have been replaced."""
    return _num_replacements


def became(parameter: Tensor) -> str | None:
    """The name of what replaced ``parameter``; ``None`` if nothing did."""
    reference = _became.get(parameter) or _replaced.get(parameter)
    owner = reference() if reference is not None else None
    return owner.name if owner is not None and owner.shard is not parameter else None


def remember_shard(owner: UnitParameter) -> None:
    _by_shard[id(owner.shard)] = owner


def owner_of(parameter: nn.Parameter) -> UnitParameter | None:
    """What ``parameter`` became, or is the shard of."""
    owner = _by_shard.get(id(parameter))
    if owner is not None and owner.shard is parameter:
        return owner
    reference = _became.get(parameter)
    became: UnitParameter | None = reference() if reference is not None else None
    return became


def sharded_places() -> set[tuple[nn.Module, str]]:
    """Where parameters of units are registered."""
    return {slot for owner in _by_shard.values() for slot in owner.slots}
