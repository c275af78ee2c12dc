"""Counts of values that nobody computed are equal, as of experts that are balanced;
what the host made is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.phantom.dry import launch, sizes
from support.dry_process import call_dry

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")

EXPERTS, TOKENS, TOP_K = 8, 63, 2


def routed() -> dict[str, Any]:
    scores = torch.randn(TOKENS, EXPERTS, device="cuda")
    chosen = scores.topk(TOP_K).indices.flatten()
    by_histc = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS)
    by_bincount = torch.bincount(chosen, minlength=EXPERTS)
    marks = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device="cuda")
    by_map = marks.scatter_(-1, chosen.view(TOKENS, TOP_K), True).sum(dim=0)
    of_host = torch.bincount(torch.tensor([0, 0, 3]).cuda(), minlength=4)
    tokens = torch.randn(TOKENS * TOP_K, 4, device="cuda")
    parts = tokens.split(by_bincount.tolist())
    return {
        "histc": by_histc.tolist(),
        "bincount": by_bincount.tolist(),
        "map": by_map.tolist(),
        "ends": by_bincount.cumsum(0).tolist(),
        "rows": [len(part) for part in parts],
        "of host": of_host.tolist(),
    }


def test_experts_are_balanced():
    found = call_dry(routed)
    equal = [16] * 6 + [15] * 2  # 63 x 2 over 8
    assert found["histc"] == found["bincount"] == found["rows"] == equal
    assert found["map"] == equal
    assert found["ends"][-1] == TOKENS * TOP_K
    assert found["of host"] == [2, 0, 0, 1]


def test_the_assumption_is_a_note_with_its_line():
    notes = call_dry(noted)
    assert notes[sizes.BALANCED] == "test_balanced_counts.py"


def noted() -> dict[str, str]:
    import sys

    torch.bincount(torch.randn(8, device="cuda").long(), minlength=4)
    inside: Any = sys.modules["_lowtide_dry.values"]
    return {
        what: where.rpartition("/")[2].partition(":")[0] for what, where in inside.notes
    }


def calls_that_are_refused() -> tuple[list[str], list[list[int]]]:
    x = torch.ones(8, 16, device="cuda")
    refused = []
    for call in (lambda: x.argmax(5), lambda: x.topk(2, dim=7)):
        try:
            call()
        except IndexError as error:
            refused.append(str(error).partition(" (")[0])
    drawn = [torch.multinomial(x, 3), torch.multinomial(x[0], 1)]
    return refused, [list(one.shape) for one in drawn]


def test_dimensions_that_are_not_there_are_torchs_to_refuse():
    """And a multinomial's number is no dimension."""
    refused, shapes = call_dry(calls_that_are_refused)
    assert refused == ["Dimension out of range"] * 2
    assert shapes == [[8, 3], [1]]


RANKS = 4


def exchanged() -> dict[str, list[int]]:
    """What ranks tell each other of how many tokens come."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    chosen = torch.randn(TOKENS + 1, EXPERTS, device="cuda").topk(TOP_K).indices
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    at_once = torch.empty_like(counts)
    dist.all_to_all_single(at_once, counts)
    parts = [torch.empty_like(part) for part in counts.chunk(RANKS)]
    dist.all_to_all(parts, list(counts.chunk(RANKS)))
    rows = counts.view(RANKS, -1)
    by_functional = functional.wait_tensor(
        functional.all_to_all_single(rows, None, None, dist.group.WORLD)
    )
    from_other = torch.zeros_like(counts)
    pair = (dist.P2POp(dist.isend, counts, 1), dist.P2POp(dist.irecv, from_other, 1))
    for work in dist.batch_isend_irecv(list(pair)):
        work.wait()
    return {
        "at once": at_once.tolist(),
        "lists": torch.stack(parts).flatten().tolist(),
        "functional": by_functional.sum(dim=1).tolist(),
        "one other's": from_other.tolist(),
    }


def test_ranks_that_exchange_counts_have_equal_ones():
    found = call_dry(exchanged, machine=launch.Machine(world=RANKS))
    assert found["at once"] == found["lists"] == [16] * EXPERTS
    assert found["functional"] == [16 * EXPERTS // RANKS] * RANKS
    # What one rank tells another need not be what it is told.
    assert found["one other's"] == [0] * EXPERTS
