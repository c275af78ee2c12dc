"""The axis of a process group: one for all gathers along it."""

import functools
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from lowtide import _C
from lowtide._base import debugging
from lowtide._base.agreement import require_same_lines
from lowtide._base.memory import device_memory

Group: TypeAlias = dist.ProcessGroup | DeviceMesh

# By the name of their group and a device.
_axes: dict[tuple[str, torch.device], tuple[_C.GatherAxis, _C.Collectives]] = {}


def process_group(group: Group, *, who: str) -> dist.ProcessGroup:
    """The group itself, or that of a 1-D mesh."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"lowtide: {who}: expected a process group or a 1-D mesh, got a mesh of "
            f"{group.ndim} dimensions {group.mesh_dim_names}. Pass one axis: "
            "mesh['tp']."
        )
    return group.get_group()


def axis_of(group: dist.ProcessGroup, device: torch.device) -> _C.GatherAxis:
    """The axis for tensors on ``device``."""
    return _axis_and_collectives(group, device)[0]


def collectives_of(group: dist.ProcessGroup, device: torch.device) -> _C.Collectives:
    """What the axis issues its collectives with, counted."""
    return _axis_and_collectives(group, device)[1]


def _axis_and_collectives(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[_C.GatherAxis, _C.Collectives]:
    key = (group.group_name, device)
    known = _axes.get(key)
    if known is not None and known[1].is_over(group):
        return known
    collectives = _C.Collectives(group.group_name, device)
    axis = _C.GatherAxis(
        collectives,
        device_memory(device),
        compare=functools.partial(_compare, group.group_name, device),
        compare_bits=debugging.enabled(),
    )
    _axes[key] = (axis, collectives)
    return axis, collectives


def group_named(group_name: str) -> dist.ProcessGroup:
    return c10d._resolve_process_group(c10d.GroupName(group_name))


def axis_named(group_name: str, device: torch.device) -> _C.GatherAxis:
    return axis_of(group_named(group_name), device)


def _compare(group_name: str, device: torch.device, lines: list[str]) -> None:
    group = group_named(group_name)
    require_same_lines(
        group,
        device,
        lines,
        who="sequence-parallel gathers",
        expected="the same shards, names and decisions in the same order",
        advice="Pad the sequence so that every rank has as many tokens, and run the "
        "same program on all ranks.",
    )
