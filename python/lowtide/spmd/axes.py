"""Axes of a mesh: a name, and the process group of its ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowtide import _C


@dataclass(frozen=True)
class Axis:
    name: str
    group: dist.ProcessGroup
    # What annotations have for a key: the group's name. All axes of one rank share a
    # group, so these have their own, too.
    key: str = field(init=False)

    def __post_init__(self) -> None:
        name = self.group_name
        key = name if self.size > 1 else f"{name}/{self.name}"
        object.__setattr__(self, "key", key)

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def group_name(self) -> str:
        return self.group.group_name

    def __repr__(self) -> str:
        return repr(self.name)

    def collectives(self, device: torch.device) -> _C.Collectives:
        known = _collectives.get((self.group_name, device.type))
        if known is None or not known.is_over(self.group):
            known = _C.Collectives(self.group_name, device)
            _collectives[self.group_name, device.type] = known
        return known


_collectives: dict[tuple[str, str], _C.Collectives] = {}


class _Current(threading.local):
    mesh: DeviceMesh | None = None


_current = _Current()


@contextlib.contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """The mesh whose axes regions and collectives inside name by string."""
    outer, _current.mesh = _current.mesh, mesh
    try:
        yield mesh
    finally:
        _current.mesh = outer


def current_mesh() -> DeviceMesh | None:
    return _current.mesh


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    return tuple(Axis(name, mesh.get_group(dim)) for dim, name in enumerate(names))


def resolve(axis: str | dist.ProcessGroup | DeviceMesh | Axis) -> Axis:
    """A name in the current mesh, a process group, or a mesh of one dimension."""
    if isinstance(axis, Axis):
        return axis
    if isinstance(axis, DeviceMesh):
        if axis.ndim != 1:
            raise ValueError(
                f"lowtide: axis: expected a mesh of one dimension, got {axis.ndim}. "
                f"Pass mesh['name']."
            )
        return axes_of(axis)[0]
    if isinstance(axis, str):
        mesh = current_mesh()
        found = [a for a in axes_of(mesh) if a.name == axis] if mesh else []
        if found:
            return found[0]
        names = [a.name for a in axes_of(mesh)] if mesh else "no current mesh"
        raise ValueError(
            f"lowtide: axis: expected one of the current mesh, got {axis!r} "
            f"({names}). Call inside `with lowtide.spmd.use_mesh(mesh)`, or pass the "
            f"process group."
        )
    desc = axis.group_desc
    name = desc.removeprefix("mesh_") if desc and desc != "undefined" else ""
    return Axis(name or axis.group_name, axis)


def rank_text() -> str:
    """ "(rank 3 of 8)" """
    if not dist.is_initialized():
        return "(rank 0 of 1)"
    return f"(rank {dist.get_rank()} of {dist.get_world_size()})"
