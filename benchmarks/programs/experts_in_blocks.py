"""Blocks of attention and experts: the experts over the ranks that have the same ones,
the rest over all ranks. By a `fully_shard` call of their own inside the block's, as in
the field, or in one call whose parameters have meshes, which FSDP2 has from torch 2.12
on.

experts_in_blocks.py fsdp2|lowtide two|one [checkpointed]
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

SYSTEM, CALLS, *OTHERS = sys.argv[1:]
if SYSTEM == "lowtide":
    from lowtide import MixedPrecisionPolicy, ShardPlacementResult, fully_shard
else:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, HIDDEN, EXPERTS, GROUPS, BLOCKS, TOKENS = 4096, 1536, 32, 2, 12, 4096
HEADS, CHOSEN = 32, 2


class Experts(nn.Module):
    """Those of this rank's group; the others' are a hop away."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        shape = (EXPERTS // GROUPS, WIDTH, HIDDEN)
        self.gate, self.up, self.down = (
            nn.Parameter(DTensor.from_local(one, mesh, [Shard(0)], run_check=False))
            for one in (
                torch.randn(shape),
                torch.randn(shape),
                torch.randn(shape).mT.contiguous(),
            )
        )

    def exchanged(self, x: Tensor) -> Tensor:
        return dist_nn.all_to_all_single(torch.empty_like(x), x, group=self.group)

    def forward(self, x: Tensor) -> Tensor:
        matrices = [p.to_local() for p in (self.gate, self.up, self.down)]
        parts = self.exchanged(x).chunk(len(matrices[0]))
        done = [
            (nn.functional.silu(part @ gate) * (part @ up)) @ down
            for part, gate, up, down in zip(parts, *matrices, strict=True)
        ]
        return self.exchanged(torch.cat(done))


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.before, self.behind = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            one(h).view(1, TOKENS, HEADS, -1).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).reshape(TOKENS, WIDTH))
        h = self.behind(x)
        # Every expert gets as many tokens: which ones takes no time.
        weights, _ = self.router(h).float().softmax(-1).topk(CHOSEN)
        h = self.experts(h.repeat_interleave(CHOSEN, 0)).view(TOKENS, CHOSEN, WIDTH)
        return x + (h * weights.unsqueeze(-1).to(h.dtype)).sum(1)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
world = dist.get_world_size()
dense = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
both = init_device_mesh("cuda", (world // GROUPS, GROUPS), mesh_dim_names=("edp", "ep"))
make = Checkpointed if OTHERS else Block
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
placed = None
if CALLS == "one":
    placed = ShardPlacementResult(None, FSDPMeshInfo(both["edp"], shard_mesh_dim=0))
blocks = []
for _ in range(BLOCKS):
    with torch.device("cuda"):
        block = make(both["ep"])
    blocks.append(block)
    if CALLS == "two":
        fully_shard(block.experts, mesh=both["edp"], mp_policy=policy)
        fully_shard(block, mesh=dense, mp_policy=policy)
        continue
    experts = set(block.experts.parameters())
    fully_shard(
        block,
        mesh=dense,
        mp_policy=policy,
        shard_placement_fn=lambda p, experts=experts: placed if p in experts else None,
    )
model = nn.Sequential(*blocks)
fully_shard(model, mesh=dense, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(TOKENS, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
