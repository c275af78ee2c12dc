"""The total norm of gradients that are never there together.

torch stacks the norms of all gradients and takes the norm of those. Here they are taken
unit by unit, of this rank's rows, and become one vector in the parameters' order, which
is then what torch has: its norm has the same bits.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops._math_ops import _NormPartial

from lowtide._sharding.common_norm import require_common
from lowtide._sharding.local_parameter import rows_of

_EPS = 1e-6  # torch.nn.utils.clip_grads_with_norm_'s


# Of a gradient: its parameter's place among all, its rows', and how it is sharded.
Norm = tuple[int, Tensor, Any]


def norms_of(places: Sequence[int], gradients: Sequence[Tensor]) -> list[Norm]:
    """L2, on the current stream."""
    norms = torch._foreach_norm([rows_of(gradient) for gradient in gradients], 2.0)
    return [
        (place, norm, (g.device_mesh, g.placements) if isinstance(g, DTensor) else None)
        for place, norm, g in zip(places, norms, gradients, strict=True)
    ]


def total_norm(norms: Sequence[Norm], parameters: Iterable[Tensor]) -> Tensor:
    """Collective, on the current stream. ``parameters``: all that may have a gradient,
    of which other ranks may have some that this one has not.

    Raises ValueError where ranks of several meshes have other norms."""
    alike: dict[Any, list[Tensor]] = {}
    beside_whole = False
    for p in parameters:
        if isinstance(p, DTensor) and p.requires_grad:
            alike[p.device_mesh, p.placements] = []
        elif not isinstance(p, DTensor):
            beside_whole |= p.requires_grad
    for _, norm, key in sorted(norms, key=lambda norm: norm[0]):
        alike.setdefault(key, []).append(norm)
    whole = alike.pop(None, [])
    meshes = list(dict.fromkeys(mesh for mesh, _ in alike))
    if len(meshes) < 2:
        alike = {key: of_rows for key, of_rows in alike.items() if of_rows}
    none = [torch.zeros_like(norms[0][1])]
    totals = [_total(key, of_rows or none) for key, of_rows in alike.items()]
    if not totals:
        return _norm(whole)
    total = _norm(totals)
    if beside_whole:
        of_whole = _norm(whole or none)
        total = torch.where(of_whole == 0, total, _norm([total, of_whole]))
    require_common(
        total, meshes, "optimize_in_backward: max_norm", beside_whole=beside_whole
    )
    return total


def _norm(norms: list[Tensor]) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms), 2.0)


def _total(key: Any, norms: list[Tensor]) -> Tensor:
    of_rows = torch.stack(norms)
    mesh, placements = key
    partial = [
        # _StridedShard, of dimensions that are split twice, is no Shard.
        placement if placement.is_replicate() else _NormPartial(2.0)
        for placement in placements
    ]
    whole = DTensor.from_local(of_rows, mesh, partial, run_check=False)
    norm = torch.linalg.vector_norm(whole, 2.0)
    assert isinstance(norm, DTensor)
    return norm.full_tensor()


def coefficient(max_norm: float, total: Tensor) -> Tensor:
    """What torch's clipping multiplies gradients of that norm by."""
    return torch.clamp(max_norm / (total + _EPS), max=1.0)


def scale_(gradients: Iterable[Tensor], by: Tensor) -> None:
    rows = [rows_of(gradient) for gradient in gradients]
    alike: dict[torch.dtype, list[Tensor]] = {}
    for each in rows:
        alike.setdefault(each.dtype, []).append(each)
    for of_dtype in alike.values():
        torch._foreach_mul_(of_dtype, by)
