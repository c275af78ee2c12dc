"""How a script comes to its ranks, and what it gets from the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli import main
from lowtide.planning import Plan, plan_request
from lowtide.planning.request import Request, Script
from lowtide.planning.run import PlanError

TRAIN = """
import json, os, torch
import torch.distributed as dist
from torch import nn

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.ones(4, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SHARD = 512 * 512 * 4 // 4


def planned(folder: Path, text: str, **settings) -> Plan:
    (folder / "train.py").write_text(TRAIN + text)
    settings = {"world": 4, "rank": 0} | settings
    return plan_request(Request(Script(str(folder / "train.py")), **settings))


def refused(folder: Path, text: str, **settings) -> str:
    with pytest.raises(PlanError) as raised:
        planned(folder, text, **settings)
    return str(raised.value)


def test_a_mesh_makes_the_group(tmp_path):
    text = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cuda", (1, 4), mesh_dim_names=("replicate", "shard"))
model = nn.Linear(512, 512, bias=False).cuda()
fully_shard(model, mesh=mesh)
train(model)
"""
    assert planned(tmp_path, text).by_category["parameters"] == SHARD


def test_processes_of_spawn_are_the_rank(tmp_path):
    text = """
import torch.multiprocessing as mp

def main(rank, world, width):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    assert rank == 2
    model = nn.Linear(width, 512, bias=False).to(rank)
    train(nn.parallel.DistributedDataParallel(model, device_ids=[rank]))

if __name__ == "__main__":
    world = torch.cuda.device_count()
    mp.spawn(main, args=(world, 512), nprocs=world)
"""
    plan = planned(tmp_path, text, rank=2)
    assert plan.by_category["parameters"] == 4 * SHARD


def test_spawn_of_another_number_of_processes(tmp_path):
    text = "torch.multiprocessing.spawn(train, nprocs=2)\n"
    assert refused(tmp_path, text) == (
        "lowtide: plan: expected torch.multiprocessing.spawn of the ranks of a node, "
        "4, got 2. Pass --world 2."
    )


@pytest.mark.parametrize("given", ["rank=1, world_size=4", "rank=0, world_size=2"])
def test_another_rank_or_world_than_asked_for(tmp_path, given):
    text = f"dist.init_process_group('nccl', {given})\n"
    rank, world = given[5], given[-1]
    assert refused(tmp_path, text) == (
        "lowtide: plan: expected init_process_group without a rank and size, or for "
        f"rank 0 of 4, got rank {rank} of {world}. Pass --world {world} --rank {rank}."
    )


ENVIRONMENT = """
names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
with open({path!r}, "w") as file:
    json.dump({{name: os.environ.get(name) for name in names}}, file)
train(nn.Linear(512, 512).cuda())
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (None, None, None)),
        (["--world", "1"], ("0", "1", "0")),
        (["--world", "16", "--rank", "11"], ("11", "16", "3")),
    ],
)
def test_environment(tmp_path, monkeypatch, options, expected):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = str(tmp_path / "found.json")
    (tmp_path / "train.py").write_text(TRAIN + ENVIRONMENT.format(path=path))
    assert main(["plan", *options, "--", str(tmp_path / "train.py")]) == 0
    assert tuple(json.loads(Path(path).read_text()).values()) == expected


def test_objects_of_other_ranks_are_those_of_this_one(tmp_path):
    text = """
dist.init_process_group("nccl")
mine, all_, kept, got = {"loss": 1}, [None] * 4, ["kept"], [None]
gathered = [None] * 4
dist.all_gather_object(all_, mine)
dist.gather_object(mine, gathered)
dist.broadcast_object_list(kept, src=0)
dist.scatter_object_list(got, list("abcd"), src=0)
assert all_ == gathered == [mine] * 4
assert (kept, got) == (["kept"], ["a"])
train(nn.Linear(512, 512).cuda())
"""
    assert planned(tmp_path, text).steps == 3


def test_distributed_checkpoints_are_said_to_be_skipped(tmp_path):
    text = f"""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = nn.Linear(512, 512, bias=False).cuda()
fully_shard(model)
state = {{"model": get_model_state_dict(model)}}
dcp.load(state, checkpoint_id="nowhere")
dcp.save(state, checkpoint_id={str(tmp_path / "c")!r})
dcp.async_save(state, checkpoint_id={str(tmp_path / "d")!r}).result()
train(model)
"""
    plan = planned(tmp_path, text)
    assert plan.by_category["parameters"] == SHARD
    assert plan.notes == [
        "torch.distributed.checkpoint.load was skipped: nothing was read",
        "torch.distributed.checkpoint.save was skipped: nothing was written",
    ]
