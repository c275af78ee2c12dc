"""fully_shard with a copy stream that prefetches batches."""

import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab: int, dim: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
init_process_group("nccl", device_id=device)
mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("dp",))

dim = int(sys.argv[1]) if len(sys.argv) > 1 else 512
with torch.device("meta"):
    model = Model(vocab=4096, dim=dim, depth=6)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
model.to_empty(device="cuda")
for module in model.modules():
    if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
        module.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

copies = torch.cuda.Stream()


def next_batch():
    with torch.cuda.stream(copies):
        return torch.randint(4096, (4, 257)).pin_memory().to(device, non_blocking=True)


batch = next_batch()
for step in range(10):
    torch.cuda.current_stream().wait_stream(copies)
    tokens = batch
    tokens.record_stream(torch.cuda.current_stream())
    batch = next_batch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for half in tokens.chunk(2):
        loss = F.cross_entropy(
            model(half[:, :-1]).float().flatten(0, 1), half[:, 1:].flatten()
        )
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    end.synchronize()
    if rank == 0:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats(device)
        print(
            step,
            loss.item(),
            begin.elapsed_time(end),
            stats["reserved_bytes.all.peak"],
            total - free,
        )
destroy_process_group()
