"""Types on tensors.

An annotation is an attribute of the tensor object: it lives as long, and an operator
outside of any region drops it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowtide.spmd.axes import Axis, resolve
from lowtide.spmd.types import ReplicationError, Type

ATTRIBUTE = "_lowtide_spmd"
CONSTANT = "constant"


@dataclass(frozen=True)
class Annotation:
    types: Mapping[str, str] = field(default_factory=dict)  # by the axis's key
    # The tensor's autograd node when it was annotated: one that comes later is from
    # an autograd function that nobody knew.
    node: int | None = None
    origin: str = ""  # "region 'mlp'", for errors

    def on(self, axis: Axis) -> str | None:
        return self.types.get(axis.key, CONSTANT if not self.types else None)


def of(tensor: torch.Tensor) -> Annotation | None:
    return getattr(tensor, ATTRIBUTE, None)


def put(tensor: torch.Tensor, types: Mapping[str, str], origin: str) -> None:
    setattr(tensor, ATTRIBUTE, Annotation(types, node_of(tensor), origin))


def node_of(tensor: torch.Tensor) -> int | None:
    node = tensor.grad_fn
    return None if node is None else node._sequence_nr()


def annotate(
    tensor: torch.Tensor,
    types: Mapping[str | dist.ProcessGroup | DeviceMesh | Axis, Type],
) -> torch.Tensor:
    """Says what `tensor` is on each axis, for parameters and others that regions use
    without taking them as inputs. Returns it.

    Raises ReplicationError if it has another type already.
    """
    known = of(tensor)
    new = dict(known.types) if known else {}
    for axis_like, type_ in types.items():
        axis = resolve(axis_like)
        old = new.get(axis.key)
        if old not in (None, type_.value):
            raise ReplicationError(
                f"lowtide: annotate: expected {type_.value} over {axis}, got {old} "
                f"from {known.origin if known else ''}. Convert the tensor, or "
                f"annotate it once."
            )
        new[axis.key] = type_.value
    put(tensor, new, "annotate()")
    return tensor


def types_of(tensor: torch.Tensor, axes: tuple[Axis, ...]) -> dict[str, Type]:
    """By axis name, what is known of `tensor`: lowtide's annotation, else that of
    spmd_types if that is loaded."""
    known = of(tensor)
    found = dict(known.types) if known else {}
    for axis in axes:
        if axis.key not in found and (type_ := _foreign(tensor, axis)) is not None:
            found[axis.key] = type_
    return {a.name: Type(found[a.key]) for a in axes if a.key in found}


def _foreign(tensor: torch.Tensor, axis: Axis) -> str | None:
    spmd_types: Any = sys.modules.get("spmd_types")
    if spmd_types is None or not spmd_types.has_local_type(tensor):
        return None
    found = spmd_types.maybe_get_axis_local_type(tensor, axis.group)
    return None if found is None else str(found.value)
