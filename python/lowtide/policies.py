"""Policies: what users choose per unit, as frozen dataclasses."""

import dataclasses

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy", "ParameterDtypes", "parameter_dtypes"]


@dataclasses.dataclass(frozen=True)
class ParameterDtypes:
    """The dtypes of one parameter on its way through a step."""

    storage: torch.dtype  # of the shard, the optimizer and `.grad`
    compute: torch.dtype  # of the full parameter and its gradient in autograd
    reduce: torch.dtype  # of the gradient in the slab and on the wire


def parameter_dtypes(
    storage: torch.dtype, policy: MixedPrecisionPolicy, *, who: str
) -> ParameterDtypes:
    """FSDP2's rule: parameters that are not floating-point are never cast, and
    gradients travel in the compute dtype unless ``reduce_dtype`` says otherwise."""
    if not storage.is_floating_point:
        return ParameterDtypes(storage, storage, storage)
    compute = policy.param_dtype or storage
    reduce = policy.reduce_dtype or compute
    if reduce not in (torch.float32, torch.bfloat16, torch.float64):
        raise NotImplementedError(
            f"lowtide: {who}: expected reduce_dtype torch.float32, torch.bfloat16 or "
            f"torch.float64, got {reduce}. Pass MixedPrecisionPolicy(reduce_dtype="
            "torch.float32): fp16 sums overflow."
        )
    return ParameterDtypes(storage, compute, reduce)
