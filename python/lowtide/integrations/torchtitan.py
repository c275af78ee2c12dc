"""torchtitan: the ``parallelize_fn`` of a model on lowtide, and optimizers whose steps
happen on all ranks or on none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide import api
from lowtide.integrations.all_or_nothing import guard
from lowtide.integrations.binding import bind

__all__ = ["build_optimizers_fn", "parallelize_fn"]


def parallelize_fn(theirs: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``theirs``, torchtitan's own for a model (``parallelize_llama``, say), with
    lowtide's ``fully_shard`` in it: for the ``parallelize_fn`` of a model's spec.

    Everything else is torchtitan's: meshes, tensor and expert parallelism, activation
    checkpointing, compiling, which modules become units and how they are prefetched.

    The result raises ValueError for a model that comes back unsharded, as torchtitan's
    does where no mesh dimension asks for FSDP.
    """

    @functools.wraps(theirs)
    def parallelize(*args: Any, **settings: Any) -> nn.Module:
        with bind():
            model = theirs(*args, **settings)
        if not any(isinstance(module, api.FSDPModule) for module in model.modules()):
            raise ValueError(
                f"lowtide: integrations.torchtitan: expected {theirs.__qualname__} to "
                f"shard {type(model).__name__}, got it without a unit. Ask for "
                "parallelism.data_parallel_shard_degree of -1, or pass torchtitan's "
                "own function."
            )
        return model

    return parallelize


def build_optimizers_fn(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``theirs``, torchtitan's ``build_optimizers`` say, with steps that are all or
    nothing: for the ``build_optimizers_fn`` of a model's spec, see
    :mod:`lowtide.integrations.all_or_nothing`."""

    @functools.wraps(theirs)
    def build(*args: Any, **settings: Any) -> Any:
        optimizers = theirs(*args, **settings)
        guard(optimizers)
        return optimizers

    return build
