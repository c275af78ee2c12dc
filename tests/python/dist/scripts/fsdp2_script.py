"""A training script as people write it for FSDP2; started by torchrun.

`test_drop_in.py` runs it as it is, then with the import line below changed.
"""

import os
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCAB, DIM, LAYERS, SEQ, BATCH = 67, 24, 3, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM)
        )

    def forward(self, x, mask=None):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(self.norm(x))


def shard(model, mesh):
    kwargs = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
    }
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)
    for layer, following in pairwise(model.layers):
        layer.set_modules_to_forward_prefetch([following])
    return model


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        start = torch.randint(0, VOCAB, (BATCH, 1), generator=generator)
        ids = (start + torch.arange(SEQ + 1) * 3) % VOCAB
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train(model, optimizer, data, steps, accumulate=2):
    rank = dist.get_rank()
    for step in range(steps):
        total = torch.zeros(())
        for i in range(accumulate):
            model.set_requires_gradient_sync(i == accumulate - 1)
            ids, targets = next(data)
            logits = model(ids)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            (loss / accumulate).backward()
            total += loss.detach() / accumulate
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        if rank == 0:
            loss = total.item() / dist.get_world_size()
            print(f"step {step} loss {loss!r} norm {norm.full_tensor().item()!r}")
        else:
            norm.full_tensor()


def main():
    checkpoint = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    torch.manual_seed(0)
    model = shard(Transformer(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    data = batches(rank)
    train(model, optimizer, data, steps=6)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint
    )

    torch.manual_seed(1)
    model = shard(Transformer(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    train(model, optimizer, data, steps=3)

    model.eval()
    with torch.no_grad():
        ids, _ = next(data)
        total = model(ids).double().sum().item()
    if rank == 0:
        print(f"sum {total!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
