"""Policies: what users choose per unit, as frozen dataclasses."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

from lowtide._torch_version import (
    OWN,
    DataParallelMeshDims,
    GradDtype,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    default_reduce_dtype,
    dtype_override,
)

__all__ = [
    "INPUT",
    "ActivationPolicy",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "GradientMode",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParameterDtypes",
    "ShardPlacementResult",
    "overridden_dtype",
    "parameter_dtypes",
    "reduced_together",
]

# How a weight's gradient gets to where it is reduced from: autograd's, copied there, or
# summed there by the layer's own GEMM.
GradientMode = Literal["exact", "fused"]

# The reserved name of a region's tensor arguments that require grad.
INPUT = "input"


REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class ParameterDtypes:
    """The dtypes of one parameter on its way through a step."""

    storage: torch.dtype  # of the shard and the optimizer
    compute: torch.dtype  # of the full parameter and its gradient in autograd
    reduce: torch.dtype  # of the gradient in the slab and on the wire
    gradient: torch.dtype  # of `.grad`
    arriving: torch.dtype  # that a gradient is rounded to before it is reduced
    # The program takes gradients of any dtype, and `.grad` as they were reduced.
    any_gradient: bool = False


def parameter_dtypes(
    storage: torch.dtype,
    policy: TorchPrecision,
    *,
    who: str,
    grad_dtype: GradDtype = OWN,
    trainable: bool = True,
) -> ParameterDtypes:
    """FSDP2's rule: parameters that are not floating-point are never cast; `.grad` has
    the parameter's ``grad_dtype``, its own where none is set; and without a
    ``reduce_dtype`` gradients travel in a ``grad_dtype`` that is set, of None, which is
    any, in the dtype they are computed in, and else as in this version of torch. A
    frozen parameter has no gradient to reduce: any dtype will do.

    Raises:
        NotImplementedError: For a dtype that is not reduced in.
    """
    if not storage.is_floating_point:
        return ParameterDtypes(storage, storage, storage, storage, storage)
    compute = policy.param_dtype or storage
    if grad_dtype == OWN:
        gradient, reduce = storage, default_reduce_dtype(storage, compute)
    elif grad_dtype is None:
        gradient = reduce = policy.reduce_dtype or compute
    else:
        gradient = reduce = grad_dtype
    reduce = policy.reduce_dtype or reduce
    if trainable and grad_dtype != OWN and gradient not in REDUCE_DTYPES:
        raise NotImplementedError(
            f"lowtide: {who}: expected grad_dtype torch.float32, torch.bfloat16, "
            f"torch.float16 or torch.float64, got {gradient}. Leave it unset."
        )
    if trainable and reduce not in REDUCE_DTYPES:
        raise NotImplementedError(
            f"lowtide: {who}: expected reduce_dtype torch.float32, torch.bfloat16, "
            f"torch.float16 or torch.float64, got {reduce}. Pass "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)."
        )
    any_gradient = grad_dtype is None and policy.reduce_dtype is None
    return ParameterDtypes(storage, compute, reduce, gradient, reduce, any_gradient)


def reduced_together(
    own: ParameterDtypes, trainable: Iterable[ParameterDtypes]
) -> ParameterDtypes:
    """FSDP2's rule for a unit of which a parameter has a ``grad_dtype`` and the policy
    no ``reduce_dtype``: all are reduced in the dtype that holds those of all
    ``trainable`` ones, and `.grad` of one that takes any stays in it."""
    dtypes = (one.reduce for one in trainable)
    widest = functools.reduce(torch.promote_types, dtypes, own.reduce)
    gradient = widest if own.any_gradient else own.gradient
    return dataclasses.replace(own, reduce=widest, gradient=gradient)


def overridden_dtype(
    parameter: torch.nn.Parameter, policy: TorchPrecision, *, who: str
) -> torch.dtype | None:
    """What the policy's ``param_dtype_override_fn`` (of torch 2.15) says of one
    parameter; None where the policy's ``param_dtype`` holds.

    Raises:
        ValueError: For another dtype than that and the parameter's own.
    """
    override = dtype_override(policy)
    dtype = override(parameter) if override is not None else None
    if dtype not in (None, policy.param_dtype, parameter.dtype):
        raise ValueError(
            f"lowtide: {who}: expected param_dtype_override_fn to return None, "
            f"the policy's param_dtype, {policy.param_dtype}, or the parameter's own, "
            f"{parameter.dtype}, got {dtype}. Convert the parameter before fully_shard."
        )
    return dtype


@dataclasses.dataclass(frozen=True)
class ActivationPolicy:
    """What becomes of the named values of a checkpointed module.

    A name is one given with :func:`lowtide.tag`, the reserved ``"input"`` (the
    module's tensor arguments that require grad), or a pattern of submodules' names
    such as ``"layers.*.attn"``, which stands for their outputs. What no list names is
    computed again in backward; the module's arguments are kept.

    Args:
        save: Kept on the device; what produced them does not run again.
        offload: Kept on the host; likewise.
        recompute: Computed again, as without a name; a name here must match, too.
        min_bytes: Values with fewer bytes are not stored.
        prefetch: Regions ahead of the one in use whose values are copied back in
            backward, and behind it that are still being copied out in forward.
        keep_last: The last regions of a forward that offload nothing, because
            backward begins with them.

    Raises:
        ValueError: For a name in two lists, or a setting out of range.
    """

    save: Sequence[str] = ()
    offload: Sequence[str] = ()
    recompute: Sequence[str] = ()
    min_bytes: int = 0
    prefetch: int = 1
    keep_last: int = 0

    def __post_init__(self) -> None:
        lists: dict[str, str] = {}
        for treatment in ("save", "offload", "recompute"):
            names = getattr(self, treatment)
            if isinstance(names, str) or not all(
                isinstance(name, str) and name for name in names
            ):
                raise ValueError(
                    f"lowtide: ActivationPolicy.{treatment}: expected a list of names, "
                    f"got {names!r}. Write {treatment}=['residual']."
                )
            object.__setattr__(self, treatment, tuple(names))
            for name in names:
                if name in lists:
                    raise ValueError(
                        f"lowtide: ActivationPolicy: expected {name!r} in one list, "
                        f"got it in {lists[name]} and {treatment}. Remove one."
                    )
                lists[name] = treatment
        if INPUT in self.recompute:
            raise ValueError(
                "lowtide: ActivationPolicy.recompute: expected values that the module "
                f"computes, got {INPUT!r}, its arguments. Remove it: arguments are "
                "kept, or offloaded if listed there."
            )
        for setting in ("min_bytes", "prefetch", "keep_last"):
            value = getattr(self, setting)
            if not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"lowtide: ActivationPolicy.{setting}: expected an integer >= 0, "
                    f"got {value!r}. Leave it out for the default."
                )

    def treatments(self) -> dict[str, str]:
        """name -> "save", "offload" or "recompute"."""
        return {
            name: treatment
            for treatment in ("save", "offload", "recompute")
            for name in getattr(self, treatment)
        }
