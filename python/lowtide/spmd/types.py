"""R, I, V, P: what a value is along one axis of a mesh."""

from __future__ import annotations

import enum


class Type(enum.Enum):
    """R replicated, I invariant, V varying, P partial.

    R and I are equal on all ranks of the axis; a gradient of R is a part of the whole
    (P), one of I is the whole (I). V is each rank's own, and so is its gradient. P is
    the sum over ranks; its gradient is equal everywhere (R).
    """

    R = "R"
    I = "I"  # noqa: E741
    V = "V"
    P = "P"

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__

    @property
    def gradient(self) -> Type:
        return {Type.R: Type.P, Type.P: Type.R}.get(self, self)


R, I, V, P = Type  # noqa: E741


class ReplicationError(RuntimeError):
    """A rule of :mod:`lowtide.spmd` does not hold."""


def error(who: str, expected: str, got: str, next_step: str) -> ReplicationError:
    return ReplicationError(
        f"lowtide: {who}: expected {expected}, got {got}. {next_step}"
    )
