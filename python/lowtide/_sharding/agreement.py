"""All ranks shard the same thing, or hear about it before the first gather."""

import torch
import torch.distributed as dist

from lowtide._base.agreement import require_same_lines
from lowtide._sharding.groups import mesh_groups
from lowtide._sharding.unit import UnitState


def require_agreement(states: list[UnitState]) -> None:
    """Compares names, shapes, dtypes and order of the units over their mesh, and in
    which order they have been gathered, and raises RuntimeError showing both sides.
    One all-gather of 32 bytes a mesh, and the descriptions only if those differ."""
    gathered = sorted(
        (state for state in states if state.unit and state.unit.state != "sharded"),
        key=lambda state: state.gathered_alone,
    )
    by_group: dict[str, tuple[dist.ProcessGroup, torch.device, list[str]]] = {}
    for state in states:
        for group in mesh_groups(state.mesh):
            entry = by_group.setdefault(group.group_name, (group, state.device, []))
            entry[2].extend(describe(state))
    for place, state in enumerate(gathered):
        for group in mesh_groups(state.mesh):
            by_group[group.group_name][2].append(
                f"unit '{state.name}' gathered as number {place} before the forward"
            )
    if len({state.groups.host for state in states} - {None}) > 1:
        # Ranks look together for all that these meshes connect (connected.py).
        names = ", ".join(state.name.removesuffix(state.over) for state in states)
        for _, _, lines in by_group.values():
            lines.append(f"several meshes under units '{names}'")
    for group, device, lines in by_group.values():
        require_same_lines(group, device, lines)


def describe(state: UnitState) -> list[str]:
    """One line for the unit and one for each parameter."""
    settings = ", ".join(
        f"{name}={getattr(state.settings, name)}"
        for name in (
            *("reshard_after_forward", "reshard_after_backward", "gradient_sync"),
            "leaf_module",
        )
    )
    rows = ", looked up in blocks of rows" if state.embedding_rows is not None else ""
    lines = [f"unit '{state.name}' ({settings}{rows})"]
    for parameter in state.parameters:
        shard = parameter.shard
        lines.append(
            f"parameter '{parameter.name}' {tuple(shard.shape)} {shard.dtype}"
            f"{'' if shard.requires_grad else ' frozen'}, "
            f"policy {state.policy_of(parameter.compute_dtype)}"
            f"{_of_class(parameter.extended_class)}"
            f"{', fused gradient' if state.fuses(parameter) else ''}"
        )
    return lines


def _of_class(extended: type[torch.Tensor] | None) -> str:
    return "" if extended is None else f", a {extended.__name__}"
