"""The Llama of llama.py, tensor- and sequence-parallel over one mesh axis and sharded
by lowtide over another.

    torchrun --nproc-per-node 4 examples/llama_parallel.py --tp 2 --steps 5

Between the layers every rank of the axis has its own tokens, [seq / size, batch, dim];
inside attention and feed-forward it has all tokens and its own heads and columns.  The
two gathers of a block, "attn_in" and "ffn_in", are done again in backward instead of
being saved.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lowtide
from llama import CONFIGS, LlamaConfig, generator, rope_table, rotate
from lowtide import fully_shard
from lowtide.sequence_parallel import ColumnParallelLinear, RowParallelLinear


class SumOfGradients(torch.autograd.Function):
    """A parameter all ranks of the axis have: each saw other tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Norm(nn.Module):
    def __init__(self, config: LlamaConfig, tp: DeviceMesh) -> None:
        super().__init__()
        self.group, self.eps = tp.get_group(), config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        weight = SumOfGradients.apply(self.weight, self.group)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class Attention(nn.Module):
    """This rank's heads of all tokens."""

    def __init__(self, config: LlamaConfig, tp: DeviceMesh) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim = config.num_heads * config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.wqkv = ColumnParallelLinear(
            config.dim, (q_dim, kv_dim, kv_dim), group=tp, name="attn_in"
        )
        self.wo = RowParallelLinear(q_dim, config.dim, group=tp)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (
            t.transpose(0, 1).unflatten(-1, (-1, self.head_dim)) for t in self.wqkv(x)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [batch, heads, seq, dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.permute(2, 0, 1, 3).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig, tp: DeviceMesh) -> None:
        super().__init__()
        self.w13 = ColumnParallelLinear(
            config.dim, (config.ffn_dim, config.ffn_dim), group=tp, name="ffn_in"
        )
        self.w2 = RowParallelLinear(config.ffn_dim, config.dim, group=tp)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, tp: DeviceMesh) -> None:
        super().__init__()
        self.attention_norm = Norm(config, tp)
        self.attention = Attention(config, tp)
        self.ffn_norm = Norm(config, tp)
        self.feed_forward = FeedForward(config, tp)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Embedding(nn.Module):
    """This rank's rows of the vocabulary; a token's row comes from the rank that has
    it."""

    def __init__(self, config: LlamaConfig, tp: DeviceMesh) -> None:
        super().__init__()
        self.tp = tp
        rows = config.vocab_size // tp.size()
        self.first = rows * tp.get_local_rank()
        self.weight = nn.Parameter(0.02 * torch.randn(rows, config.dim))

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens.t() - self.first  # [seq, batch]
        mine = row.ge(0) & row.lt(len(self.weight))
        x = F.embedding(row.where(mine, 0), self.weight) * mine.unsqueeze(-1)
        return lowtide.sequence_parallel.sp_reduce_scatter(x, self.tp)


class SplitCrossEntropy(torch.autograd.Function):
    """Of logits whose last dim is split over the axis; mean over all tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: DeviceMesh) -> Tensor:
        group, first = tp.get_group(), logits.shape[-1] * tp.get_local_rank()
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        exponentials = (logits - top.unsqueeze(-1)).exp()
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        row = targets - first
        mine = row.ge(0) & row.lt(logits.shape[-1])
        row = row.where(mine, 0).unsqueeze(-1)
        target = logits.gather(-1, row).squeeze(-1) * mine
        dist.all_reduce(target, group=group)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), row, mine)
        return (total.log() + top - target).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, row, mine = ctx.saved_tensors
        ones = mine.unsqueeze(-1).to(probabilities.dtype)
        result = probabilities.scatter_add(-1, row, -ones)
        return result.mul_(gradient / mine.numel()), None, None


class ParallelLlama(nn.Module):
    """Tokens and targets [batch, seq] to the loss."""

    rope: Tensor

    def __init__(self, config: LlamaConfig, tp: DeviceMesh) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        self.tok_embeddings = Embedding(config, tp)
        self.layers = nn.ModuleList(Block(config, tp) for _ in range(config.num_layers))
        self.norm = Norm(config, tp)
        self.output = ColumnParallelLinear(
            config.dim, config.vocab_size, group=tp, name="head_in"
        )
        self.register_buffer("rope", rope_table(config), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        rope = self.rope[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rope)
        logits = self.output(self.norm(x)).float()
        return SplitCrossEntropy.apply(logits, targets.t(), self.tp)


# Where the parameters of `Llama` are here: name, dim that is split over the axis.
SPLIT = {
    "tok_embeddings.weight": ("tok_embeddings.weight", 0),
    "output.weight": ("output.weights.0", 0),
    "attention.wq.weight": ("attention.wqkv.weights.0", 0),
    "attention.wk.weight": ("attention.wqkv.weights.1", 0),
    "attention.wv.weight": ("attention.wqkv.weights.2", 0),
    "attention.wo.weight": ("attention.wo.weight", 1),
    "feed_forward.w1.weight": ("feed_forward.w13.weights.0", 0),
    "feed_forward.w3.weight": ("feed_forward.w13.weights.1", 0),
    "feed_forward.w2.weight": ("feed_forward.w2.weight", 1),
}


def place_of(name: str) -> tuple[str, int | None]:
    """Of a parameter of `Llama`: its name here, and the dim that is split."""
    for theirs, (ours, dim) in SPLIT.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours, dim
    return name, None


def origin_of(name: str) -> tuple[str, int | None]:
    """Of a parameter here: its name in `Llama`, and the dim that is split."""
    for theirs, (ours, dim) in SPLIT.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs, dim
    return name, None


@torch.no_grad()
def load_whole(model: ParallelLlama, state: dict[str, Tensor]) -> None:
    """This rank's part of each parameter of a `Llama`."""
    parameters = dict(model.named_parameters())
    for name, whole in state.items():
        ours, dim = place_of(name)
        if dim is not None:
            whole = whole.chunk(model.tp.size(), dim)[model.tp.get_local_rank()]
        parameters[ours].copy_(whole)


def shard(model: ParallelLlama, dp: DeviceMesh) -> ParallelLlama:
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def train(config: LlamaConfig, mesh: DeviceMesh, steps: int) -> list[float]:
    torch.manual_seed(dist.get_rank())  # weights differ along the axis
    model = shard(ParallelLlama(config, mesh["tp"]), mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        # Ranks of one tensor-parallel axis see the same batch.
        random = generator(step, f"batch of {mesh['dp'].get_local_rank()}")
        start = torch.randint(0, config.vocab_size, (2, 1), generator=random)
        tokens = (start + torch.arange(config.max_seq_len + 1)) % config.vocab_size
        with lowtide.sequence_parallel.gather_policy(
            regather=["attn_in", "ffn_in"], min_bytes=0
        ):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", choices=tuple(CONFIGS), default="tiny")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu",
        (dist.get_world_size() // options.tp, options.tp),
        mesh_dim_names=("dp", "tp"),
    )
    losses = train(CONFIGS[options.config], mesh, options.steps)
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
