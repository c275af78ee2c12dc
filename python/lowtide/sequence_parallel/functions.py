"""The operators of sequence parallelism: gathers along dim 0 and their inverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor

from lowtide import _C
from lowtide._base import open_regions
from lowtide._base.backward import in_backward
from lowtide._gather.axes import Group, axis_of, process_group
from lowtide.sequence_parallel import operators
from lowtide.sequence_parallel.policy import decide, prefetch_bytes


def sp_all_gather(
    shard: Tensor, group: Group, name: str, *, regather: bool | None = None
) -> Tensor:
    """The shards of all ranks of ``group``, one after the other along dim 0.

    [rows, ...] to [size * rows, ...]; every rank has as many rows. Backward is a
    reduce-scatter. With ``regather`` autograd saves the shard where consumers save the
    result, or views of it, and backward gathers once for all of them; that needs
    ``with lowtide.sequence_parallel.gather_policy(...)`` around the forward.

    Args:
        group: A process group, or a 1-D mesh.
        name: For policies and messages; layers may share it.
        regather: None: as the innermost :class:`gather_policy` decides, else no.
    """
    pg = _checked("sp_all_gather", name, shard, group)
    again = decide(name, _gathered_bytes(shard, pg), regather)
    if _opaque(shard):
        if again:
            raise RuntimeError(
                f"lowtide: sp_all_gather '{name}': expected eager code where a gather "
                "is done again in backward, got code under compilation. Use "
                "sp_gather_linear, or pass regather=False."
            )
        return operators.all_gather(shard, pg.group_name, name)
    unseen = again and not in_backward() and _C.active_gather_hooks() == "none"
    if regather and unseen:
        raise RuntimeError(
            f"lowtide: sp_all_gather '{name}': expected `with "
            "lowtide.sequence_parallel.gather_policy(...):` around the forward for "
            "regather=True, got none: what consumers save could not be seen. Add it, "
            "or use sp_gather_linear."
        )
    return _C.sp_all_gather(
        axis_of(pg, shard.device),
        shard,
        name,
        regather=again,
        prefetch_bytes=prefetch_bytes(),
    )


def sp_gather_linear(
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    group: Group,
    name: str,
    regather: bool | None = None,
    addmm: bool = False,
) -> tuple[Tensor, ...]:
    """Linear layers on the gathered shard, in one node of the graph.

    One gather in forward for all ``weights``; with ``regather`` one more in backward,
    shared by all weight gradients, instead of a saved tensor of ``size`` times the
    shard's bytes; one reduce-scatter of the shard's gradient. Works under
    ``torch.compile(fullgraph=True)`` as an opaque pair of operators.

    Args:
        shard: [rows, ..., features].
        weights: Each [outputs, features], usually this rank's rows of a larger one.
        biases: None, or one or None for each weight, [outputs].
        regather: None: as the innermost :class:`gather_policy` decides, else no.
        addmm: Add the products of the shard's gradient inside the matrix
            multiplication. Saves a temporary of the gathered size. In bf16 the sums
            differ from separate layers in the last bit, otherwise all bits are equal.

    Returns:
        One tensor [size * rows, ..., outputs] for each weight.
    """
    who = "sp_gather_linear"
    pg = _checked(who, name, shard, group)
    weights = tuple(weights)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    _check_weights(f"{who} '{name}'", shard, weights, biases)
    again = decide(name, _gathered_bytes(shard, pg), regather)
    if _opaque(shard):
        return operators.gather_linear(
            shard, weights, biases, pg.group_name, name, again, addmm
        )
    outputs = _C.sp_gather_linear(
        axis_of(pg, shard.device),
        shard,
        list(weights),
        list(biases),
        name,
        regather=again,
        prefetch_bytes=prefetch_bytes(),
        addmm=addmm,
    )
    return tuple(outputs)


def sp_reduce_scatter(partial: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum over ``group``: [size * rows, ...] to [rows, ...].
    Backward is an all-gather."""
    pg = _checked("sp_reduce_scatter", None, partial, group)
    if _opaque(partial):
        return operators.reduce_scatter(partial, pg.group_name)
    return _C.sp_reduce_scatter(axis_of(pg, partial.device), partial)


def _opaque(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or tensor.is_meta or is_fake(tensor)


def _gathered_bytes(shard: Tensor, group: Any) -> int:
    return shard.numel() * shard.element_size() * group.size()


def _checked(who: str, name: str | None, tensor: Tensor, group: Group) -> Any:
    if name is not None:
        who = f"{who} '{name}'"
    _refuse_regions(who)
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"lowtide: {who}: expected this rank's part as a plain tensor, got a "
            "DTensor. Pass x.to_local(), or use "
            "lowtide.sequence_parallel.rematerialize_gathers on the parallelised model."
        )
    if tensor.dim() == 0:
        raise ValueError(
            f"lowtide: {who}: expected a tensor with a dim 0 to gather along, got a "
            "scalar. Reshape it to [1]."
        )
    return process_group(group, who=who)


def _refuse_regions(who: str) -> None:
    """A region counts collectives by the types of values; these have none."""
    if torch.compiler.is_compiling():  # regions are in no graph
        return
    if (name := open_regions.innermost()) is not None:
        raise RuntimeError(
            f"lowtide: {who}: expected a call outside of the regions of lowtide.spmd, "
            f"got one inside region {name!r}. Use the typed collectives of "
            "lowtide.spmd there, or end the region before the layer."
        )


def _check_weights(
    who: str,
    shard: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
) -> None:
    if not weights or len(biases) != len(weights):
        raise ValueError(
            f"lowtide: {who}: expected at least one weight and a bias or None for "
            f"each, got {len(weights)} weights and {len(biases)} biases. Pass lists of "
            "equal length."
        )
    for weight in weights:
        if isinstance(weight, DTensor):
            raise ValueError(
                f"lowtide: {who}: expected weights that are plain tensors, got a "
                "DTensor. Pass weight.to_local(), inside the module that fully_shard "
                "gathers for."
            )
        if shard.dim() < 2 or weight.dim() != 2 or weight.shape[1] != shard.shape[-1]:
            raise ValueError(
                f"lowtide: {who}: expected weights [outputs, features] and a shard "
                f"[rows, ..., features], got {tuple(weight.shape)} and "
                f"{tuple(shard.shape)}. Transpose or reshape them."
            )
