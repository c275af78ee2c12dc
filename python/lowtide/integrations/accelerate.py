"""accelerate's own FSDP2 plugin on lowtide, and so transformers' Trainer, which trains
through it."""

from __future__ import annotations

from typing import Any, TypeVar

from lowtide.integrations.all_or_nothing import guard
from lowtide.integrations.binding import bind

__all__ = ["use_lowtide"]

_Accelerator = TypeVar("_Accelerator", bound=Any)


def use_lowtide(
    accelerator: _Accelerator, *, all_or_nothing: bool = False
) -> _Accelerator:
    """Makes ``accelerator.prepare`` shard with lowtide; returns ``accelerator``.

    Everything else is accelerate's: the upcast to fp32, loading on rank 0 alone,
    which modules become units, clipping, ``save_state``, ``load_state`` and
    ``get_state_dict``. Of a Trainer pass ``trainer.accelerator``, before ``train``.

    Args:
        all_or_nothing: Steps of the optimizers that are prepared happen on all ranks
            or on none, see :mod:`lowtide.integrations.all_or_nothing`.

    Raises:
        ValueError: For an accelerator that does not shard with FSDP2. Its ``prepare``
            raises NotImplementedError for tensor parallelism where accelerate lacks a
            class of transformers' for it.
    """
    if not accelerator.is_fsdp2:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        got = "none" if plugin is None else f"version {plugin.fsdp_version}"
        raise ValueError(
            "lowtide: integrations.accelerate: expected an accelerator with the FSDP "
            f"plugin, version 2, got {got} ({accelerator.distributed_type}). Pass "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or to the "
            "Trainer fsdp='full_shard auto_wrap', fsdp_config={'version': 2}; "
            "accelerate offers it on accelerators only."
        )
    prepare = accelerator.prepare

    def prepare_with_lowtide(*objects: Any, **settings: Any) -> Any:
        # Its function imports torch's when it is called.
        with bind():
            try:
                prepared = prepare(*objects, **settings)
            except ImportError as error:
                _explain(error, accelerator)
                raise
        if all_or_nothing:
            for optimizer in accelerator._optimizers:
                guard(optimizer.optimizer)
        return prepared

    accelerator.prepare = prepare_with_lowtide
    return accelerator


def _explain(error: ImportError, accelerator: Any) -> None:
    """accelerate prepares tensor-parallel models with a class of transformers', which
    has gone since these are placed as they are loaded."""
    if "ReplicateParallel" not in str(error):
        return
    raise NotImplementedError(
        "lowtide: integrations.accelerate: expected a transformers that has "
        "ReplicateParallel, which accelerate needs for "
        f"ParallelismConfig(tp_size={accelerator.parallelism_config.tp_size}), got one "
        f"without it ({error}). Load the model with transformers' "
        "DistributedConfig(tp_size=..., fsdp_size=...), which shards it, after "
        "lowtide.integrations.bind(), and leave out the plugin."
    ) from error
