"""``clip_grad_norm_``: torch's, which may also skip a step whose gradients are not
finite."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowtide._sharding import flat_norm
from lowtide._sharding.local_parameter import sharded_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    skip_nonfinite: bool = False,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` with one more argument. Takes
    ``local_parameters(model)`` for ``model.parameters()``.

    The same bits as torch's, except for the L2 norm of gradients on CUDA, or offloaded
    from there, that are sharded alike: that takes one kernel for a rank's shards and
    one scalar between the ranks, summed in another order. (torch's needs a process
    group with a backend for the host's tensors where gradients are offloaded.)

    Args:
        skip_nonfinite: If the total norm is infinite or NaN, as after one rank had a
            NaN, drop every gradient: the optimizer's next ``step`` then changes
            neither parameters nor moments. The norm is the same on all ranks, so they
            skip together. Costs a wait for the norm on the host.

    Returns:
        The total norm before clipping, a ``DTensor`` if the gradients are; not finite
        if the step is skipped.
    """
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    chosen = [sharded_of(parameter) for parameter in given]
    gradients = [p.grad for p in chosen if p.grad is not None]
    flat = (
        norm_type == 2.0
        and foreach is not False
        and not error_if_nonfinite
        and any(g.is_cuda or flat_norm.is_elsewhere(g) for g in gradients)
        and flat_norm.fits(gradients)
    )
    if flat:
        norm = flat_norm.total_norm(gradients)
    else:
        norm = torch.nn.utils.get_total_norm(
            gradients, norm_type, error_if_nonfinite, foreach
        )
    if skip_nonfinite:
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not bool(torch.isfinite(whole)):
            for p in chosen:
                p.grad = None
            return norm
    if flat:
        flat_norm.scale_(gradients, max_norm, norm)
    else:
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, norm, foreach)
    return norm
