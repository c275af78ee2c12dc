"""All ranks shard the same thing, or hear about it before the first gather."""

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lowtide._state.groups import mesh_groups

if TYPE_CHECKING:
    from lowtide._state.unit import UnitState


def require_agreement(states: "list[UnitState]") -> None:
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
    for group, device, lines in by_group.values():
        require_same_lines(group, device, lines)


def describe(state: "UnitState") -> list[str]:
    """One line for the unit and one for each parameter."""
    settings = ", ".join(
        f"{name}={state.settings[name]}"
        for name in ("reshard_after_forward", "reshard_after_backward", "gradient_sync")
    )
    lines = [f"unit '{state.name}' ({settings})"]
    for parameter in state.parameters:
        shard = parameter.shard
        lines.append(
            f"parameter '{parameter.name}' {tuple(shard.shape)} {shard.dtype}"
            f"{'' if shard.requires_grad else ' frozen'}, policy {state.policy}"
            f"{_of_class(parameter.extended_class)}"
            f"{', fused gradient' if state.fuses(parameter) else ''}"
        )
    return lines


def _of_class(extended: type[torch.Tensor] | None) -> str:
    return "" if extended is None else f", a {extended.__name__}"


def require_same_lines(
    group: dist.ProcessGroup,
    device: torch.device,
    lines: list[str],
    *,
    who: str = "fully_shard",
    expected: str = "the same units and parameters in the same order",
    advice: str = "Build and wrap the model the same way on every rank.",
) -> None:
    """Raises RuntimeError where the ranks of ``group`` differ in ``lines``, showing
    both sides. One all-gather of 32 bytes, and the lines only if those differ."""
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    all_digests = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(all_digests, mine, group=group)
    digests = all_digests.view(group.size(), -1).cpu()
    if bool((digests == digests[0]).all()):
        return
    everyone: list[list[str] | None] = [None] * group.size()
    dist.all_gather_object(everyone, lines, group=group)
    first = everyone[0]
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != first)
    theirs = everyone[other]
    assert first is not None and theirs is not None
    length = max(len(first), len(theirs))
    padded = [
        (side + ["nothing more"] * (length - len(side))) for side in (first, theirs)
    ]
    place = next(i for i in range(length) if padded[0][i] != padded[1][i])
    raise RuntimeError(
        f"lowtide: {who}: expected {expected} on every rank, got {padded[0][place]} on "
        f"rank 0 and {padded[1][place]} on rank {other} (entry {place} of {length}, "
        f"rank {group.rank()} of {group.size()}). {advice}"
    )
