"""Ranks compare lines of text, and all hear of the first that differs."""

import hashlib

import torch
import torch.distributed as dist

from lowtide._torch_version import all_gather_single


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
    all_gather_single(all_digests, mine, group=group)
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
