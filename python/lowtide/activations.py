"""``checkpoint`` and ``tag``: which activations are saved, offloaded or recomputed."""

import functools
import types
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowtide import _C
from lowtide._activation import regions, remat_regions
from lowtide._base.classes import ClassSwap
from lowtide.policies import INPUT, ActivationPolicy

__all__ = ["checkpoint", "tag"]

_Module = TypeVar("_Module", bound=nn.Module)

_BOOK = regions.book()
_RECOMPUTE_ALL = ActivationPolicy()


def tag(x: Tensor, name: str) -> Tensor:
    """Names the bytes of ``x`` for :class:`ActivationPolicy`; returns ``x`` itself.

    Tag a value where the model computes it, or before it enters a block: a name on a
    block's output and on the next block's argument is the same value. Views share
    their bytes' names; a later write in place ends them. Without grad mode it does
    nothing.
    """
    if torch.is_grad_enabled():
        if name == INPUT:
            raise ValueError(
                f"lowtide: tag: expected a name of yours, got {INPUT!r}, which means "
                "a checkpointed module's arguments. Choose another."
            )
        if torch.compiler.is_compiling():
            from lowtide._activation import compiled

            return compiled.tag(x, name)
        _C.name_value(_BOOK, x, name)
    elif regions.observers:
        for observer in regions.observers:
            observer(x, name)
    return x


def checkpoint(module: _Module, policy: ActivationPolicy = _RECOMPUTE_ALL) -> _Module:
    """Checkpoints ``module``, in place: of what its forward computes only what
    ``policy`` stores stays for backward, the rest is computed again there.

    Semantics of ``torch.utils.checkpoint`` with ``use_reentrant=False`` and early
    stop: random generators and autocast are replayed, regions nest, every kind of
    backward works but ``create_graph``. In-place writes to what backward needs raise.
    Combine with ``fully_shard`` and ``module.compile()`` in any order.

    After the first backward a name of the policy that matched nothing, or stored
    nothing, raises ValueError with the reason.

    Returns:
        The same module.

    Raises:
        ValueError: If it is checkpointed already, has no forward, or a pattern of the
            policy matches no submodule.
    """
    name = type(module).__name__
    if not isinstance(module, nn.Module) or isinstance(
        module, nn.ModuleList | nn.ModuleDict
    ):
        raise ValueError(
            f"lowtide: checkpoint: expected a module with a forward, got {name}. Call "
            "it on the modules inside."
        )
    if regions.region_state(module) is not None:
        raise ValueError(
            f"lowtide: checkpoint: expected a module without a policy, got {name}, "
            "which has one. Put all names into one ActivationPolicy."
        )
    named = {
        listed: regions.submodules_named(module, listed)
        for listed in policy.treatments()
    }
    for listed, modules in named.items():
        if regions.is_pattern(listed) and not modules:
            raise ValueError(
                f"lowtide: checkpoint({name}): expected {listed!r} to match a "
                "submodule, got none. "
                f"{regions.nearest(listed, regions.descendant_names(module))}"
            )
    remat_regions.follow(tag)
    regions.attach(module, policy)
    _checkpointed.apply(module)
    for listed, modules in named.items():
        for submodule in modules:
            submodule.register_forward_hook(functools.partial(_tag_output, listed))
    return module


def _tag_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        tag(output, name)
        return
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            tag(leaf, name)


# -- becoming checkpointed ----------------------------------------------------------


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _call_in_graph(self, *args, **kwargs)
    if (region := regions.region_state(self)) is None:
        # Made of a checkpointed module's class, as a slice of a Sequential is.
        return type(self)._lowtide_original.__call__(self, *args, **kwargs)
    compiled = region.compiled_call
    if compiled is not None:
        return compiled(*args, **kwargs)
    remat_regions.follow(tag)  # it may have been imported since
    return regions.run_region(self, args, kwargs)


def _call_in_graph(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Dynamo imports it when it traces this, and finds its way around `run_region`.
    from lowtide._activation import compiled  # noqa: F401

    return regions.run_region(self, args, kwargs)


def _compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    region = regions.region_state(self)
    if region is not None and region.treats_inside_a_graph():
        call = types.MethodType(_call_in_graph, self)
        region.compiled_call = torch.compile(call, *args, **kwargs)
    else:
        nn.Module.compile(self, *args, **kwargs)


def _checkpointed_class(original: type) -> type:
    """Calls of its modules, hooks and compiled code included, run in the region."""
    return type(
        f"Checkpointed{original.__name__}",
        (original,),
        {
            "__call__": _call,
            "compile": _compile,
            "__module__": original.__module__,
            "_lowtide_original": original,
        },
    )


_checkpointed = ClassSwap(_checkpointed_class)
