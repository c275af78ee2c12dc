"""Debug mode: whether what the types call equal is equal.

[Note: Which operator]
Every value that is R, I or constant over an axis is hashed where it is made, and every
gradient that is, where it arrives. The hashes are compared once, at the end of the
region's forward and of its backward, so that all ranks raise together; the first that
differs names the operator.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from lowtide import _C
from lowtide.spmd.axes import Axis, rank_text
from lowtide.spmd.types import error

_REPLICAS = ("R", "I", "constant")


@dataclass
class _Value:
    label: str  # "my::gelu", "input 'x'"
    where: str
    types: Mapping[str, str]
    digest: int
    device: torch.device
    users: list[str] = field(default_factory=list)  # "my::gelu at train.py:12"
    gradient: int | None = None


class _Mode(threading.local):
    on = False


_mode = _Mode()


@contextlib.contextmanager
def compare_replicas() -> Iterator[None]:
    """Regions that begin inside compare their replicated values and gradients over
    the ranks: one host copy a value, two small all-gathers an axis and direction."""
    outer, _mode.on = _mode.on, True
    try:
        yield
    finally:
        _mode.on = outer


def comparing(region: str, axes: tuple[Axis, ...]) -> Replicas | None:
    return Replicas(region, axes) if _mode.on else None


class Replicas:
    """The hashes of one forward of a region."""

    def __init__(self, name: str, axes: tuple[Axis, ...]) -> None:
        self._name = name
        self._axes = axes
        self._values: list[_Value] = []
        self._of: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._index: dict[int, int] = {}  # id of a tensor alive -> its value

    def add(
        self, tensor: torch.Tensor, types: Mapping[str, str], label: str, where: str
    ) -> None:
        index = len(self._values)
        value = _Value(label, where, types, _C.digest(tensor), tensor.device)
        self._values.append(value)
        self._of[id(tensor)] = tensor
        self._index[id(tensor)] = index
        if tensor.requires_grad and set(types.values()) & {"I", "P"}:

            def arrived(gradient: torch.Tensor) -> None:
                value.gradient = _C.digest(gradient)

            tensor.register_hook(arrived)

    def uses(
        self,
        result: torch.Tensor,
        operands: list[torch.Tensor],
        label: str,
        where: str,
    ) -> None:
        for operand in operands:
            if operand is not result and self._of.get(id(operand)) is operand:
                users = self._values[self._index[id(operand)]].users
                users.append(f"{label} at {where}")

    def compare_forward(self) -> None:
        for axis in self._axes:
            values = [v for v in self._values if v.types[axis.key] in _REPLICAS]
            found = self._difference(axis, values, [v.digest for v in values])
            if found is None:
                continue
            value, ranks = found
            type_ = value.types[axis.key]
            from_operator = "::" in value.label or "." in value.label
            what = f"the output of {value.label}" if from_operator else value.label
            raise error(
                f"region {self._name!r}",
                f"{what} at {value.where} to be equal over {axis}, as its type {type_} "
                f"says",
                f"other values on ranks {ranks} of the axis {rank_text()}",
                f"Correct the rule, which does not hold over {axis}."
                if from_operator
                else "Correct what is passed, or declare V.",
            )

    def compare_backward(self) -> None:
        arrived = [v for v in reversed(self._values) if v.gradient is not None]
        for axis in self._axes:
            values = [v for v in arrived if v.types[axis.key] in ("I", "P")]
            digests = [v.gradient for v in values if v.gradient is not None]
            found = self._difference(axis, values, digests)
            if found is None:
                continue
            value, ranks = found
            by = " or ".join(dict.fromkeys(value.users))
            source = f"the backward of {by}" if by else "the region's caller"
            raise error(
                f"region {self._name!r}",
                f"the gradient of {value.label} at {value.where} to be equal over "
                f"{axis}, as {value.types[axis.key]} requires",
                f"other values on ranks {ranks} of the axis, from {source} "
                f"{rank_text()}",
                "Correct that backward, or the rule.",
            )
        for value in self._values:
            value.gradient = None

    def _difference(
        self, axis: Axis, values: list[_Value], digests: list[int]
    ) -> tuple[_Value, list[int]] | None:
        """The first value that differs, and on which ranks it is not rank 0's."""
        if not self._values:
            return None
        device = self._values[0].device
        found = _C.first_difference(axis.collectives(device), device, digests)
        if found is None:
            return None
        index, by_rank = found
        if index < 0:
            raise error(
                f"region {self._name!r}",
                f"the same operators on all ranks of {axis}",
                f"{by_rank} replicated values by rank {rank_text()}",
                "Make control flow the same on all ranks.",
            )
        ranks = [r for r, value in enumerate(by_rank) if value != by_rank[0]]
        return values[index], ranks
