"""Every mechanism of lowtide in one model, started with torchrun: hybrid sharding,
fused gradients, activations offloaded by name, re-gathered sequence parallelism, a head
that streams its rows.

    train_every_mechanism.py fused | exact      gradients
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide.losses import linear_cross_entropy, stream_rows

WIDTH, HIDDEN, VOCABULARY, TOKENS = 512, 2048, 8192, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = lowtide.tag(x, "residual")
        group = dist.group.WORLD
        tokens = lowtide.sequence_parallel.sp_all_gather(
            self.norm(x), group, name="tokens"
        )
        hidden = lowtide.tag(F.gelu(self.up(tokens)), "hidden")
        return x + lowtide.sequence_parallel.sp_reduce_scatter(self.down(hidden), group)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(x, self.head, tokens, chunking="vocabulary")


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    with torch.device("cuda"):
        model = Model()
    lowtide.wrap(
        model,
        mesh,
        mp_policy=lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        activations=lowtide.ActivationPolicy(offload=["residual"], save=["hidden"]),
        grads=sys.argv[1],  # type: ignore[arg-type]
    )
    stream_rows(model.head)
    optimizer = torch.optim.AdamW(lowtide.local_parameters(model), fused=True)
    tokens = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    for _ in range(3):
        with lowtide.sequence_parallel.gather_policy(regather="all", min_bytes=0):
            loss = model(tokens)
        loss.backward()
        lowtide.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(lowtide.memory_report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
