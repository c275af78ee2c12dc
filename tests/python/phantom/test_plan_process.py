"""The process that a plan runs in: which rank it is, what it gets from the others, what
it may start, and when it ends."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lowtide.phantom.dry import launch
from lowtide.planning import Plan
from lowtide.planning.dry_device import machine
from lowtide.planning.request import Request, Script
from support.planned import plan_text

# Rank 11 of two machines of eight, which the program starts itself on each.
TRAIN = """
import json, os, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

found = {}

def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)

def main(local_rank, world, width):
    rank = 8 * int(os.environ["GROUP_RANK"]) + local_rank
    found["refused"] = [
        refused(dist.init_process_group, "nccl", rank=1, world_size=world),
        refused(dist.init_process_group, "nccl", rank=rank, world_size=2),
        refused(mp.spawn, main, nprocs=2),
    ]
    dist.init_process_group("nccl", rank=rank, world_size=world)
    found["rank"] = [dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()]
    found["device"] = str(torch.ones(1, device="cuda").device)
    exchange_objects()
    model = nn.Linear(width, width, bias=False).cuda()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id="nowhere")
    dcp.save(state, checkpoint_id="folder")
    with open("found.json", "w") as file:
        json.dump(found, file)
    train(model, TensorDataset(torch.randn(64, width)))

def exchange_objects():
    everyones, kept, given = [None] * 16, ["kept"], [None]
    dist.all_gather_object(everyones, {"loss": dist.get_rank()})
    dist.broadcast_object_list(kept, src=0)
    dist.scatter_object_list(given, list("abcdefghijklmnop"), src=11)
    found["objects"] = [everyones, kept, given]

def train(model, data):
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in DataLoader(data, batch_size=8, num_workers=2, collate_fn=stack):
        model(rows.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def stack(rows):
    return torch.stack([row for row, in rows])

if __name__ == "__main__":
    mp.spawn(main, args=(16, 512), nprocs=torch.cuda.device_count())
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Plan, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        plan = plan_text(folder, TRAIN, world=16, rank=11)
    assert not (folder / "folder").exists()
    return plan, json.loads((folder / "found.json").read_text())


def test_processes_of_spawn_are_the_rank(trained):
    _, found = trained
    assert found["rank"] == [11, 16, 8]
    assert found["device"] == "cuda:3"  # which the program does not choose


def test_another_rank_or_world_than_asked_for(trained):
    _, found = trained
    group = (
        "lowtide: phantom: expected init_process_group without a rank and size, or for "
        "rank 11 of 16, got rank {0} of {1}. Pass --world {1} --rank {0}."
    )
    assert found["refused"] == [
        group.format(1, 16),
        group.format(11, 2),
        "lowtide: phantom: expected torch.multiprocessing.spawn of the ranks of a "
        "machine, 8, got 2. Pass --world 2.",
    ]


def test_a_mesh_of_replicas_and_shards(trained):
    plan, _ = trained
    assert plan.by_category["parameters"] == 512 * 512 * 4 // 8
    assert plan.steps == 3


def test_objects_of_other_ranks_are_those_of_this_one(trained):
    plan, found = trained
    assert found["objects"] == [[{"loss": 11}] * 16, ["kept"], ["l"]]
    line = 1 + TRAIN[: TRAIN.index("dist.broadcast")].count("\n")
    said = [note for note in plan.notes if "is the object that was there" in note]
    (note,) = said  # of the broadcast: nothing came from rank 0
    assert f"(train.py:{line})" in note


def test_distributed_checkpoints_are_said_to_be_skipped(trained):
    plan, _ = trained
    said = [note.partition(" (")[0] for note in plan.notes if "was skipped" in note]
    assert said == [
        "torch.distributed.checkpoint.load was skipped: nothing was read",
        "torch.distributed.checkpoint.save was skipped: nothing was written",
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"torchrun": False}, [None] * 4),
        ({"world": 1}, ["0", "1", "0", "1"]),
        ({"world": 16, "rank": 11}, ["11", "16", "3", "8"]),
    ],
)
def test_environment(settings, expected):
    request = Request(Script(("train.py",)), **settings)
    found = launch.environment(machine(request), {"RANK": "7"})
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    assert [found.get(name) for name in names] == expected


def test_page_locked_memory_is_a_servers_unless_it_is_told():
    found = launch.environment(launch.Machine(), {})
    assert int(found["LOWTIDE_PINNED_BYTES"]) == 128 << 30
    found = launch.environment(launch.Machine(), {"LOWTIDE_PINNED_BYTES": "7"})
    assert found["LOWTIDE_PINNED_BYTES"] == "7"


# Says that it runs by holding a lock, which the system releases.
WAITS = """
import fcntl, time
held = open("lock", "w")
fcntl.flock(held, fcntl.LOCK_EX)
open("began", "w").close()
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_ends_with_the_command(tmp_path, signal_number):
    (tmp_path / "train.py").write_text(WAITS)
    command = [sys.executable, "-m", "lowtide", "plan", "--", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as started:
        assert comes_true((tmp_path / "began").exists)
        assert not is_released(tmp_path / "lock")
        started.send_signal(signal_number)
    assert comes_true(lambda: is_released(tmp_path / "lock"))


def comes_true(condition) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.1)
    return False


def is_released(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


SMALL = """
import torch
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(8, 64, device="cuda")).sum().backward()
optimizer.step()
"""


def test_memory_of_the_host_is_the_simulations_own(tmp_path):
    """Linux lets a process begin with the peak of who started it."""
    ballast = bytearray(b"x") * (3 << 29)
    found = plan_text(tmp_path, SMALL)
    assert found.host_memory < len(ballast)
