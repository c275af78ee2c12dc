"""Blocks whose experts are over the ranks that have the same ones, the rest over
all, in one call of torch's `fully_shard` each; before torch 2.12, which takes no mesh
for a parameter, under `lowtide run`."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
except ImportError:
    from lowtide import ShardPlacementResult

WIDTH, HIDDEN, EXPERTS, GROUPS, BLOCKS, TOKENS = 1024, 512, 8, 2, 4, 2048


class Experts(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.group = mesh.get_group()
        shape = (EXPERTS // GROUPS, WIDTH, HIDDEN)
        self.up, self.down = (
            nn.Parameter(DTensor.from_local(one, mesh, [Shard(0)], run_check=False))
            for one in (torch.randn(shape), torch.randn(shape).mT.contiguous())
        )

    def exchanged(self, x):
        return dist_nn.all_to_all_single(torch.empty_like(x), x, group=self.group)

    def forward(self, x):
        up, down = self.up.to_local(), self.down.to_local()
        parts = zip(self.exchanged(x).chunk(len(up)), up, down, strict=True)
        done = [torch.relu(part @ one) @ other for part, one, other in parts]
        return self.exchanged(torch.cat(done))


class Block(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.experts = Experts(mesh)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.experts(x)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
world = dist.get_world_size()
dense = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
both = init_device_mesh("cuda", (world // GROUPS, GROUPS), mesh_dim_names=("edp", "ep"))
with torch.device("cuda"):
    model = nn.Sequential(*(Block(both["ep"]) for _ in range(BLOCKS)))
placed = ShardPlacementResult(None, FSDPMeshInfo(both["edp"], shard_mesh_dim=0))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for block in model:
    experts = set(block.experts.parameters())
    fully_shard(
        block,
        mesh=dense,
        mp_policy=policy,
        shard_placement_fn=lambda p, experts=experts: placed if p in experts else None,
    )
fully_shard(model, mesh=dense, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(TOKENS, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
