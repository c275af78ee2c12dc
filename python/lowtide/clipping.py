"""``clip_grad_norm_``: torch's, which may also skip a step whose gradients are not
finite."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lowtide._sharding import flat_norm
from lowtide._sharding.common_norm import require_common
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
    ``local_parameters(model)`` for ``model.parameters()``, and parameters of several
    meshes, as experts' beside others, whose norms are combined as torchtitan combines
    them, and parameters that are not sharded. Beside these, and where meshes have other
    ranks, ranks compare the norm, which waits for it.

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
        The total norm before clipping, a ``DTensor`` if the gradients are, of one mesh;
        not finite if the step is skipped.

    Raises:
        ValueError: On all ranks, if they have other norms, as where each has experts
            of its own that no ``DTensor`` tells of, or gradients of parameters that are
            not sharded which nobody has averaged.
    """
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    chosen = [sharded_of(parameter) for parameter in given]
    groups = _by_mesh(chosen)
    flat = norm_type == 2.0 and foreach is not False and not error_if_nonfinite
    # Of several, each alone may not be finite on this rank alone.
    raises = error_if_nonfinite and len(groups) == 1
    by_kernel, norms = [], []
    for group in groups:
        gradients = [p.grad for p in group if p.grad is not None]
        if not gradients and len(groups) > 1:
            # Other ranks may have some.
            gradients = [torch.zeros_like(min(group, key=Tensor.numel))]
        by_kernel.append(flat and _is_flat(gradients))
        norms.append(
            flat_norm.total_norm(gradients)
            if by_kernel[-1]
            else torch.nn.utils.get_total_norm(gradients, norm_type, raises, foreach)
        )
    norm = norms[0]
    if len(groups) > 1:
        norm = _common(groups, norms, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"lowtide: clip_grad_norm_: expected a finite norm of order {norm_type}"
                f", got {float(norm)}. Leave the step out, as skip_nonfinite=True does."
            )
    if skip_nonfinite:
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not bool(torch.isfinite(whole)):
            for p in chosen:
                p.grad = None
            return norm
    by = norm.to_local() if isinstance(norm, DTensor) and len(groups) > 1 else norm
    for group, alone in zip(groups, by_kernel, strict=True):
        if not alone:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, by, foreach)
        elif scaled := [p.grad for p in group if p.grad is not None]:
            flat_norm.scale_(scaled, max_norm, by)
    return norm


def _is_flat(gradients: list[Tensor]) -> bool:
    """Whether a kernel takes their norm, and another scales them."""
    on_device = any(g.is_cuda or flat_norm.is_elsewhere(g) for g in gradients)
    return on_device and flat_norm.fits(gradients)


def _by_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Those of each mesh, then those that are not sharded: of what may have a gradient,
    so all ranks have the same."""
    groups: dict[DeviceMesh, list[Tensor]] = {}
    whole: list[Tensor] = []
    for p in parameters:
        if p.requires_grad or p.grad is not None:
            of_mesh = isinstance(p, DTensor)
            (groups.setdefault(p.device_mesh, []) if of_mesh else whole).append(p)
    return [*groups.values(), *filter(None, [whole])] or [parameters]


def _common(
    groups: list[list[Tensor]], norms: list[Tensor], norm_type: float
) -> Tensor:
    """Of all groups; raises ValueError where ranks have others."""
    meshes = [p.device_mesh for p, *_ in groups if isinstance(p, DTensor)]
    of_all = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    sharded = _combined(of_all[: len(meshes)], norm_type)
    if len(meshes) == len(groups):
        require_common(sharded, meshes, "clip_grad_norm_")
        return sharded
    whole = of_all[-1].to(sharded.device)
    both = _combined([sharded, whole], norm_type)
    norm = torch.where(whole == 0, sharded, both)  # whose bits are torch's
    require_common(norm, meshes, "clip_grad_norm_", beside_whole=True)
    if len(meshes) > 1:
        return norm
    replicated = [Replicate()] * meshes[0].ndim
    return DTensor.from_local(norm, meshes[0], replicated, run_check=False)


def _combined(whole: list[Tensor], norm_type: float) -> Tensor:
    """torchtitan's, in its order of operations."""
    if len(whole) == 1:
        return whole[0]
    if math.isinf(norm_type):
        return torch.stack(whole).max()
    total = whole[0] ** norm_type
    for norm in whole[1:]:
        total = total + norm**norm_type
    return total ** (1.0 / norm_type)
