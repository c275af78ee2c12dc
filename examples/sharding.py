"""Moving from FSDP2 to lowtide is one changed import."""

from __future__ import annotations

import torch

from llama import Llama


def shard(model: Llama, system: str, param_dtype: torch.dtype) -> None:
    """In place, over all ranks: one unit per block, one for the rest."""
    if system == "lowtide":
        from lowtide import MixedPrecisionPolicy, fully_shard
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
