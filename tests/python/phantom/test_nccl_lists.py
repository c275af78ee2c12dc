"""One launch of NCCL gathers a unit's weights, whichever of torch's groups it is."""

from __future__ import annotations

import pytest
import torch

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import launch
from support.dry_process import call_dry

BACKENDS = (
    ("nccl", "nccl2", "nccl-lazy", "nccl-legacy") if VERSION >= (2, 15) else ("nccl",)
)
WIDTH = 2048  # small weights travel as one tensor
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")


def gathers_of_a_step(backend: str) -> list[tuple[int, int]]:
    """(bytes, group) of each all-gather of weights in one step."""
    import torch
    import torch.distributed as dist

    import lowtide
    from lowtide.phantom.dry import driver

    dist.init_process_group(backend, device_id=torch.device("cuda", 0))
    weights = (torch.nn.Linear(WIDTH, WIDTH, False, device="cuda") for _ in range(2))
    model = lowtide.fully_shard(torch.nn.Sequential(*weights))
    before = driver.num_calls()
    model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
    return [
        (call.bytes, call.group)
        for call in driver.calls()[before:]
        if call.kind == "all_gather" and (call.bytes > WIDTH or not call.bytes)
    ]


def found_of(
    backend: str, environment: dict[str, str] | None = None
) -> list[tuple[int, int]]:
    return call_dry(
        gathers_of_a_step,
        backend,
        machine=launch.Machine(world=8),
        environment=environment,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_one_launch_and_nothing_empty_travels(backend):
    found = found_of(backend)
    assert [num_bytes for num_bytes, _ in found] == [4 * WIDTH * WIDTH // 8] * 2
    groups = {group for _, group in found}
    assert len(groups) == 1
    assert groups != {0}


@pytest.mark.skipif(VERSION < (2, 15), reason="torch groups lists itself")
def test_where_a_communicator_does_not_block_each_is_launched_by_itself():
    groups = [group for _, group in found_of("nccl2", NONBLOCKING)]
    assert groups == [0, 0]


MIB = 1 << 20
# Rows of weights of 1,024 columns in fp32, and their bytes: both at most what is small
# at 128 ranks (24 KiB a rank), and one above it.
SMALL_ROWS, SMALL_AT_MOST_ROWS, LARGE_ROWS = 256, 768, 896


def entries_of_a_gather() -> tuple[list[int], int]:
    """Bytes of the calls of NCCL's that gather one unit's weights, each times the
    ranks, and in how many groups they were made."""
    import torch
    import torch.distributed as dist

    import lowtide
    from lowtide.phantom.dry import driver

    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    rows = (SMALL_ROWS, SMALL_ROWS, SMALL_AT_MOST_ROWS, LARGE_ROWS)
    weights = [torch.nn.Linear(1024, n, False, device="cuda") for n in rows]
    model = lowtide.fully_shard(torch.nn.Sequential(*weights))
    before = driver.num_calls()
    model.unshard()
    calls = [
        call
        for call in driver.calls()[before:]
        if call.kind == "all_gather" and call.bytes
    ]
    ranks = dist.get_world_size()
    return [ranks * call.bytes for call in calls], len({call.group for call in calls})


# Of what is packed, and of each weight that is not, in bytes of all ranks.
ENTRIES = {8: [MIB, MIB, 3 * MIB, 7 * MIB // 2], 128: [5 * MIB, 7 * MIB // 2]}


@pytest.mark.parametrize("among", ENTRIES)
def test_what_is_small_among_many_ranks_is_one_entry_of_a_gather(among):
    """Each entry pays the ring of all ranks, which is small in a node."""
    machine = launch.Machine(world=among)
    entries, groups = call_dry(entries_of_a_gather, machine=machine)
    assert sorted(entries) == sorted(ENTRIES[among])
    assert groups == 1
