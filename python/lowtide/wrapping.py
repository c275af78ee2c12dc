"""``wrap``: shards a whole model in one call and says what it decided."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lowtide._sharding import arguments, blocks
from lowtide._sharding import modules as managed
from lowtide._sharding.blocks import Decision
from lowtide._sharding.placements import PlacementFn
from lowtide._sharding.unit import unit_state
from lowtide.activations import checkpoint
from lowtide.api import default_mesh, fully_shard
from lowtide.losses import deferred
from lowtide.losses._heads import NoHead, find_head, known_loss
from lowtide.policies import (
    ActivationPolicy,
    GradientMode,
    OffloadPolicy,
)

__all__ = ["wrap"]

_Module = TypeVar("_Module", bound=nn.Module)

_DEFAULT_PRECISION = MixedPrecisionPolicy()


def wrap(
    model: _Module,
    mesh: DeviceMesh | None = None,
    *,
    units: str | Sequence[str] = "auto",
    mp_policy: MixedPrecisionPolicy = _DEFAULT_PRECISION,
    activations: ActivationPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    grads: GradientMode = "exact",
    defer_logits: bool | None = None,
) -> _Module:
    """Shards ``model`` in place, block by block, and prints on rank 0 of ``mesh`` what
    became a unit of its own and why.

    Equal to calling :func:`fully_shard` on each of the printed modules and then on
    ``model``, with the same settings. With ``units="auto"`` these are

    - *blocks*: what an ``nn.ModuleList`` or ``nn.Sequential`` repeats, outermost first;
    - an ``nn.Embedding`` or ``nn.Linear`` outside the blocks that is large beside one
      and shares its weight with no other module: the embedding and the head.

    Never a module without a forward of its own, nor one of several of a class under
    names in an ``nn.ModuleDict``, of which a step may run some. What is left, tied
    weights included, is gathered with ``model`` itself. A model that reads the weight
    of a unit without calling it raises in its first forward, naming ``units`` to pass.

    Args:
        model: Any module with a ``forward``.
        mesh: As in :func:`fully_shard`.
        units: Or the fully qualified names of the modules to make units.
        activations: :func:`checkpoint` policy of every block. Models of Hugging Face
            need ``model.config.use_cache = False``, which is said if it is not so.
        defer_logits: Whether to :func:`lowtide.defer_logits` of the head. By
            default where the model is one of transformers that computes its
            ``ForCausalLMLoss``, which is printed: loss and gradients are then
            ``linear_cross_entropy``'s, and logits have to be looked at before the
            weights change. With ``False`` they are FSDP2's, bit for bit.
        mp_policy, reshard_after_forward, shard_placement_fn, offload_policy,
            ignored_params, grads: As in :func:`fully_shard`, for every unit.

    Returns:
        ``model``.

    Raises:
        ValueError: For a name that is no module of ``model``, ``activations`` without
            a block, or ``defer_logits=True`` without one linear layer that is the
            head.
    """
    arguments.require_shardable(model, "wrap")
    arguments.check_settings(mesh, mp_policy, offload_policy, grads, "wrap")
    mesh = mesh if mesh is not None else default_mesh()
    ignored = ignored_params or set()
    parameters = managed.managed_parameters(model.modules(), ignored)
    managed.require_initialized((model,), parameters, "wrap")
    if isinstance(units, str):
        _require_auto(units)
        decision = blocks.decide(model, ignored)
    else:
        decision = blocks.as_told(model, units)
    if activations is not None:
        _checkpoint_blocks(decision, activations)
        decision.notes.extend(_notes_on(model))
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "grads": grads,
    }
    head = _head_to_defer(model, decision, reshard_after_forward, defer_logits)
    text = blocks.describe(model, decision, mesh, mp_policy)
    if head is not None:
        text += f"\n  {head.name}: logits are deferred, {head.why}"
    # Its sizes are of full parameters.
    instead = [blocks.without(decision, unit) for unit in decision.units]
    for unit, others in zip(decision.units, instead, strict=True):
        fully_shard(unit.module, **settings)
        state = unit_state(unit.module)
        assert state is not None
        state.instead = f"pass {others} to lowtide.wrap, which chose this one"
        state.chosen_by_wrap = True
    fully_shard(model, **settings)
    if head is not None:
        deferred.defer_logits(head.module)
    if dist.get_rank() == int(mesh.mesh.flatten()[0]):
        print(text)
    return model


@dataclasses.dataclass(frozen=True)
class _Head:
    name: str
    module: nn.Linear
    why: str


def _head_to_defer(
    model: nn.Module,
    decision: Decision,
    reshard_after_forward: bool | int | None,
    wanted: bool | None,
) -> _Head | None:
    """See ``wrap``'s ``defer_logits``."""
    if wanted is False:
        return None
    loss = known_loss(model)
    if wanted is None and not loss:
        return None
    try:
        name, head = find_head(model)
    except NoHead as error:
        if wanted is None:
            return None
        raise ValueError(
            f"lowtide: wrap: defer_logits=True: {error} Pass it to "
            "lowtide.defer_logits."
        ) from None
    alone = any(unit.module is head for unit in decision.units)
    if wanted is None and not alone and reshard_after_forward:
        # Gone by the time of a loss outside of the forward.
        return None
    why = "as you told" if wanted else f"the loss is {loss}: defer_logits=False"
    return _Head(name, head, why if wanted else f"{why} makes them")


def _require_auto(units: str) -> None:
    if units != "auto":
        raise ValueError(
            "lowtide: wrap: expected units to be 'auto' or a list of module names, got "
            f"{units!r}. Write units=[{units!r}] to name one module."
        )


def _checkpoint_blocks(decision: Decision, policy: ActivationPolicy) -> None:
    repeated = [unit.module for unit in decision.units if unit.is_block]
    if not repeated:
        raise ValueError(
            "lowtide: wrap: expected repeated blocks to give the activation policy to, "
            "got none. Call lowtide.checkpoint on the modules you mean."
        )
    for block in repeated:
        checkpoint(block, policy)


def _notes_on(model: nn.Module) -> list[str]:
    """Settings of the model that do not go with computing blocks again."""
    if getattr(getattr(model, "config", None), "use_cache", False) is not True:
        return []
    return [
        "config.use_cache: true, and a block computed again would find its own keys in "
        "the cache: set model.config.use_cache = False to train"
    ]
