"""The dry driver knows which ranks of the world a communicator of NCCL is of."""

from __future__ import annotations

import json

import pytest
import torch

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import launch
from lowtide.phantom.dry.driver import Call, Communicator
from support import communicators_dry_run
from support.dry_process import call_dry, run_dry

WORLD = tuple(range(32))
# The group that makes a communicator where it is first used.
LAZY = "nccl-legacy" if VERSION >= (2, 15) else "nccl"
needs_nccl2 = pytest.mark.skipif(VERSION < (2, 15), reason="torch has no such group")


def run(
    *how: str, rank: int, environment: dict[str, str] | None = None
) -> tuple[list[Communicator], list[Call]]:
    machine = launch.Machine(world=32, rank=rank)
    done = run_dry(
        *(communicators_dry_run.__file__, *how),
        machine=machine,
        environment=environment,
    )
    found = json.loads(done.stdout)
    communicators = [
        Communicator(*numbers, tuple(ranks), name)
        for *numbers, ranks, name in found["communicators"]
    ]
    return communicators, [Call(*call) for call in found["calls"]]


@pytest.mark.parametrize("rank", [1, 30])
def test_of_a_mesh_the_shard_group_is_consecutive_the_replicate_group_strided(rank):
    communicators, _ = run(LAZY, "--sends", rank=rank)
    shard, replicate = rank - rank % 4, rank % 4
    assert [(each.ranks, each.rank) for each in communicators] == [
        (WORLD[replicate::4], rank // 4),
        (WORLD[shard : shard + 4], rank % 4),
        (WORLD, rank),
        ((rank, 31), 0),
        ((0, rank), 1),
    ]
    names = [each.name for each in communicators]
    assert len(set(names)) == len(names)
    assert all(names)


def test_the_first_rank_makes_the_ids_that_others_find():
    of_0, of_1 = (
        [each[3:] for each in run(LAZY, "--sends", rank=rank)[0]] for rank in (0, 1)
    )
    shared = [of_0[place] for place in (1, 2, 4)]  # shard, world, the pair of both
    assert shared == [of_1[place] for place in (1, 2, 4)]
    assert len(set(of_0)) == len(of_0)


def test_parts_that_are_split_off_have_their_ranks_and_are_calls_on_the_whole():
    communicators, calls = run("nccl", "--bound", rank=5)
    assert [(each.ranks, each.rank) for each in communicators] == [
        (WORLD, 5),
        (WORLD[1::4], 1),
        (WORLD[4:8], 1),
        ((0, 5), 1),
    ]
    made = [(call.kind, call.communicator) for call in calls if not call.bytes]
    assert made == [
        *[("init", 1), ("split", 1), ("init", 2), ("split", 1), ("init", 3)],
        *[("split", 1), ("init", 4)],
    ]


@needs_nccl2
@pytest.mark.parametrize("ranks_per_root", ["128", "10"])
def test_nccl2_binds_the_device_itself_and_sends_on_the_whole(ranks_per_root):
    environment = {"TORCH_NCCL_RANKS_PER_ROOT": ranks_per_root}
    communicators, calls = run("nccl", "--sends", rank=30, environment=environment)
    assert [(each.ranks, each.rank) for each in communicators] == [
        (WORLD, 30),
        (WORLD[2::4], 7),
        (WORLD[28:], 2),
        ((0, 30), 1),
    ]
    assert communicators[0].name == "0"
    assert [call.communicator for call in calls if call.kind == "send"] == [1]


@needs_nccl2
def test_lazy_nccl2_has_a_communicator_for_each_pair():
    communicators, calls = run("nccl-lazy", "--sends", rank=5)
    assert [(each.ranks, each.name) for each in communicators[3:]] == [
        ((5, 31), "0/5:31"),
        ((0, 5), communicators[4].name),
    ]
    assert [call.communicator for call in calls if call.kind == "send"] == [4]


def of_the_device() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    import lowtide

    dist.init_process_group("cpu:gloo,cuda:nccl")
    layer = lowtide.fully_shard(torch.nn.Linear(8, 8, device="cuda"))
    layer(torch.ones(1, 8, device="cuda")).sum().backward()
    groups = dist.distributed_c10d._world.pg_map
    return {g.group_desc: dist.get_backend_config(g) for g in groups}


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_a_second_group_has_no_backend_for_the_host():
    """It would connect every pair of ranks once more, for nothing."""
    backends = call_dry(of_the_device, machine=launch.Machine(world=8))
    assert backends["lowtide_reduce"] == "cuda:nccl"
