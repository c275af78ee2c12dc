"""Typed collectives and conversions, differentiable, also twice.

The way back is in the table of docs/replication_rules.md. Inside a region the input's
type is checked, outside only if it is annotated.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide import _C
from lowtide.spmd import annotation
from lowtide.spmd.annotation import CONSTANT
from lowtide.spmd.axes import Axis, resolve
from lowtide.spmd.frame import Frame, current
from lowtide.spmd.source import line
from lowtide.spmd.types import I, P, R, Type, V, error


def all_gather(
    x: torch.Tensor, axis: Any, *, src: Type = V, dst: Type = R, dim: int = 0
) -> torch.Tensor:
    """Every rank's ``x``, joined along ``dim`` in the order of ranks.

    V -> R; backward is a reduce-scatter. V -> I; backward takes this rank's slice::

        rank 0   A            A B
        rank 1   B     =>     A B
    """
    return _apply("all_gather", x, axis, src, dst, join=dim)


def reduce_scatter(
    x: torch.Tensor, axis: Any, *, src: Type = P, dst: Type = V, dim: int = 0
) -> torch.Tensor:
    """This rank's slice along ``dim`` of the sum over ranks.

    P -> V; backward is an all-gather::

        rank 0   A0 B0         A0 + A1
        rank 1   A1 B1   =>    B0 + B1
    """
    return _apply("reduce_scatter", x, axis, src, dst, split=dim)


def all_reduce(
    x: torch.Tensor, axis: Any, *, src: Type = P, dst: Type = R
) -> torch.Tensor:
    """The sum over ranks. P -> R; backward is an all-reduce. P -> I; backward sends
    nothing::

        rank 0   A            A + B
        rank 1   B     =>     A + B
    """
    return _apply("all_reduce", x, axis, src, dst)


def all_to_all(
    x: torch.Tensor,
    axis: Any,
    *,
    src: Type = V,
    dst: Type = V,
    split_dim: int = 0,
    concat_dim: int = 0,
) -> torch.Tensor:
    """Cuts ``x`` along ``split_dim``, sends part r to rank r and joins what arrives
    along ``concat_dim``. V -> V; backward is the all-to-all back::

        rank 0   A0 A1         A0 B0
        rank 1   B0 B1   =>    A1 B1
    """
    return _apply("all_to_all", x, axis, src, dst, split=split_dim, join=concat_dim)


def convert(
    x: torch.Tensor, axis: Any, *, src: Type, dst: Type, dim: int = 0
) -> torch.Tensor:
    """Another type for the same meaning, without communication in forward.

    I -> R (backward: all-reduce), R -> I, I -> V (this rank's slice along ``dim``;
    backward: all-gather), R -> V (the same slice), V -> P (zeros beside it), R -> P and
    I -> P (zeros but on rank 0).
    """
    return _apply("convert", x, axis, src, dst, split=dim, join=dim)


def reinterpret(x: torch.Tensor, axis: Any, *, src: Type, dst: Type) -> torch.Tensor:
    """Another type for the same bytes, in both directions: R -> V, V -> P, R -> P.

    What is summed over later grows by the number of ranks where R became P.
    """
    return _apply("reinterpret", x, axis, src, dst)


def _apply(
    operation: str,
    x: torch.Tensor,
    axis_like: Any,
    src: Type,
    dst: Type,
    *,
    split: int = 0,
    join: int = 0,
) -> torch.Tensor:
    backward = _C.transition_backward(operation, src.value, dst.value)
    frame = current()
    axis = _axis(axis_like, frame)
    known = _check(operation, x, axis, src, frame)
    if frame is not None:
        frame.record.begin_operator(f"spmd.{operation}", line())
        sends = backward and axis.size > 1  # a rank alone sends nothing
        if sends and torch.is_grad_enabled() and x.requires_grad:
            frame.record.require(backward, axis.group_name)
    try:
        result = _C.apply_transition(
            x,
            operation,
            src.value,
            dst.value,
            axis.collectives(x.device),
            split=split,
            join=join,
        )
    finally:
        if frame is not None:
            frame.record.end_operator()
    if known is not None:
        types = {**known, axis.key: dst.value}
        place = f"spmd.{operation} at {line()}"
        annotation.put(result, types, place)
        if frame is not None:
            frame.add_value(result, types, f"spmd.{operation}", line())
            if frame.replicas is not None:
                frame.replicas.uses(result, [x], f"spmd.{operation}", line())
    return result


def _axis(axis: Any, frame: Frame | None) -> Axis:
    for known in frame.axes if frame is not None else ():
        if axis == known.name:
            return known
    return resolve(axis)


def _check(
    operation: str, x: torch.Tensor, axis: Axis, src: Type, frame: Frame | None
) -> dict[str, str] | None:
    """The types of ``x`` by axis key, if they are known."""
    known = annotation.of(x)
    checked = frame is not None and frame.checks
    if known is None and not checked:
        return None
    if checked:
        from lowtide.spmd.checker import Checker

        assert frame is not None
        types = Checker(frame)._types(x, f"the input of spmd.{operation}")
    else:
        assert known is not None
        types = dict(known.types)
    have = types.get(axis.key, CONSTANT if not types else None)
    either = have in ("R", "I") and not x.requires_grad or have == CONSTANT
    if have in (None, src.value) or (either and src in (R, I)):
        return types
    raise error(
        f"spmd.{operation}",
        f"a tensor of type {src} over {axis}",
        f"{have} at {line()}",
        "Pass src= its type if the table has that pair, or convert it first.",
    )
