"""What a region's author declared, read on the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from lowtide.spmd import axes
from lowtide.spmd.axes import Axis
from lowtide.spmd.types import Type


def region_axes(name: str, mesh: DeviceMesh | None, declared: Any) -> tuple[Axis, ...]:
    """The axes of the mesh, else of the current mesh, else those declared by group."""
    mesh = mesh or axes.current_mesh()
    if mesh is not None:
        return axes.axes_of(mesh)
    found = {axis.key: axis for axis in map(axes.resolve, _groups(declared))}
    if not found:
        raise ValueError(
            f"lowtide: region {name!r}: expected a mesh, got none. Pass mesh=, or call "
            f"inside `with lowtide.spmd.use_mesh(mesh)`."
        )
    return tuple(found.values())


def _groups(declared: Any) -> Iterator[Any]:
    if isinstance(declared, Mapping):
        for key, value in declared.items():
            if not isinstance(key, str):
                yield key
            yield from _groups(value)
    elif isinstance(declared, (tuple, list)):
        for entry in declared:
            yield from _groups(entry)


class Declaration:
    """One entry for each tensor, by name or in order; see :class:`region`."""

    def __init__(self, who: str, declared: Any, on: Sequence[Axis]) -> None:
        self._who = who
        self._axes = on
        if self._is_one(declared):
            declared = [declared]
        self.by_name = isinstance(declared, Mapping)
        names = declared if self.by_name else [str(i) for i in range(len(declared))]
        entries = declared.values() if self.by_name else declared
        self.types = {
            name: self._types(name, entry)
            for name, entry in zip(names, entries, strict=True)
        }

    def __len__(self) -> int:
        return len(self.types)

    def _is_one(self, declared: Any) -> bool:
        if isinstance(declared, Type):
            return True
        names = {axis.name for axis in self._axes}
        return isinstance(declared, Mapping) and all(
            not isinstance(key, str) or key in names for key in declared
        )

    def _types(self, name: str, entry: Any) -> dict[str, str]:
        """By axis key."""
        if isinstance(entry, Type):
            return {axis.key: entry.value for axis in self._axes}
        found = {self._resolve(key).key: type_.value for key, type_ in entry.items()}
        missing = [axis for axis in self._axes if axis.key not in found]
        if missing:
            raise ValueError(
                f"lowtide: {self._who} {name!r}: expected a type for every axis, got "
                f"none for {missing}. Write one of R, I, V, P."
            )
        return found

    def _resolve(self, axis: Any) -> Axis:
        for known in self._axes:
            if axis == known.name:
                return known
        return axes.resolve(axis)
