"""What NCCL's communicators take beside torch's allocator: arithmetic of its source,
held against what was reported of real ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console

from lowtide.phantom.machines import DGX, DGX_A100, Network
from lowtide.phantom.nccl_buffers import bytes_of, communicators
from lowtide.planning import table
from support import planned

MIB = 1 << 20


def call(kind: str, *, peer: int = -1, most_ctas: int = 0) -> dict[str, Any]:
    return {"kind": kind, "peer": peer, "most_ctas": most_ctas}


def mebibytes(
    kinds: str,
    ranks: int = 8,
    rank: int = 0,
    *,
    network: Network = DGX,
    stride: int = 1,
    most_ctas: int = 0,
) -> float:
    calls = [call("init", most_ctas=most_ctas), *map(call, kinds.split())]
    of_world = tuple(range(0, stride * ranks, stride))
    return bytes_of(of_world, rank, calls, network) / MIB


def test_an_all_to_all_has_the_buffers_that_were_reported():
    """NVIDIA/nccl issue 1685, eight H100: 32 channels a pair, buffers of 10485760 and
    of 2097152 bytes, together 3.28 GB more."""
    assert (DGX.receive_buffer, DGX.send_buffer) == (10485760, 2097152)
    assert mebibytes("all_to_all") == 7 * 32 * 12
    assert 0.8 < mebibytes("all_to_all") * MIB / 3.28e9 < 1


def test_rank_0_of_four_a100s_takes_as_much_more_than_of_two_as_was_reported():
    """NVIDIA/nccl issue 964: 688 MB after an all-reduce of 4 MB among more than two,
    544 among two."""
    four, two = (mebibytes("all_reduce", n, network=DGX_A100) for n in (4, 2))
    assert four - two == 688 - 544
    assert two < 544


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", 0),
        ("all_gather", 24 * 12),
        ("all_gather reduce_scatter broadcast", 24 * 12),
        ("all_gather all_reduce", 24 * (12 + 10)),  # the chain's first
    ],
)
def test_calls_connect_what_they_need(kinds, expected):
    assert mebibytes(kinds) == expected


def test_every_rank_of_a_node_has_its_place_in_the_chain():
    found = [mebibytes("all_reduce", rank=rank) for rank in range(8)]
    assert found == [24 * 22, *[24 * 24] * 6, 24 * 14]


def test_fewer_channels_take_less():
    assert mebibytes("all_gather", most_ctas=4) == 4 * 12
    assert mebibytes("all_gather", most_ctas=400) == 24 * 12


def test_between_nodes_every_rank_has_its_share_of_what_leaves():
    in_node, between = 7 * 12, 2 * 10
    assert mebibytes("all_gather", 64) == 16 * (in_node + between) / 8
    assert mebibytes("all_gather", 4, stride=8) == 16 * 20  # nobody else in its node
    tree = in_node + 3 * between
    assert mebibytes("all_reduce", 64) == 16 * (in_node + between + tree) / 8


def test_pairs_between_nodes_share_their_buffers():
    far = [call("send", peer=peer) for peer in (8, 9)]
    near = [call("recv", peer=1), call("send", peer=1)]
    everyone = tuple(range(16))
    assert bytes_of(everyone, 0, far, DGX) / MIB == 2 * 64
    assert bytes_of(everyone, 0, near, DGX) / MIB == 32 * 12
    assert bytes_of(everyone, 0, far + near, DGX) / MIB == 2 * 64 + 32 * 12


def test_communicators_that_nothing_was_asked_of_are_left_out():
    def made(number: int, *ranks: int, purpose: str = "") -> dict[str, Any]:
        numbers = {"number": number, "rank": 0, "size": len(ranks), "ranks": ranks}
        return numbers | {"name": f"group {number}", "purpose": purpose}

    logged = {
        "communicators": [
            made(1, 0, 1, purpose="default_pg"),
            made(2, 0),
            made(3, 0, 1),
            made(-1, 0, 1),
        ],
        "calls": [
            *({"communicator": n} | call("init") for n in (1, 2, 3)),
            *({"communicator": n} | call("all_gather") for n in (1, 2, -1)),
        ],
    }
    (found,) = communicators(logged, DGX)
    expected = {"group": "default_pg", "ranks": 2, "bytes": 24 * 12 * MIB}
    assert dataclasses.asdict(found) == expected


def test_a_plan_has_them(capsys):
    plan = planned.plan_script("train_every_mechanism.py", "exact", world=8)
    assert {each.ranks for each in plan.communicators} == {2, 4, 8}
    found = {each.group: each.bytes for each in plan.communicators}
    assert found["lowtide_reduce"] == 24 * 12 * MIB
    assert plan.to_dict()["nccl_buffers"] == sum(c.bytes for c in plan.communicators)
    table.show(plan, Console(width=400))
    shown = capsys.readouterr().out.splitlines()
    (line,) = [each for each in shown if each.startswith("beside it NCCL's buffers")]
    assert "lowtide_reduce 288 MiB" in line


PROGRAM = """
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
weight = torch.nn.Parameter(torch.zeros(64 << 20, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_fits_has_room_for_them(tmp_path):
    plan = planned.plan_text(tmp_path, PROGRAM, world=8)
    assert plan.nccl_buffers == 24 * 22 * MIB
    enough = plan.peak_reserved + plan.nccl_buffers
    exact, tight = (
        planned.plan_text(tmp_path, PROGRAM, world=8, device_memory=enough - less)
        for less in (0, 1)
    )
    assert (exact.fits, exact.retries) == (True, 0)
    assert not tight.fits
