"""A small Llama-like model: nine parameters a block, embedding, norm, head.

Sizes are free, so that dim 0 can be uneven over the ranks, smaller than the
world, or leave a rank with a shard of zero rows:

    vocab = 101           101 rows over 2, 3 or 4 ranks are uneven
    kv_dim = 2            two rows: ranks 2 and 3 of four hold nothing
    logit_scale = True    a parameter of one row: only rank 0 holds any
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import nn

ROPE_BASE = 10000.0


@dataclass(frozen=True)
class ModelConfig:
    dim: int = 32
    num_layers: int = 2
    vocab: int = 101
    num_heads: int = 4
    num_kv_heads: int = 1
    kv_dim: int = 8
    ffn: int = 42
    seq: int = 12
    batch: int = 2
    logit_scale: bool = False
    dropout: float = 0.0
    frozen: tuple[str, ...] = ()  # fnmatch patterns of parameter names


TINY = ModelConfig(dim=16, num_heads=2, kv_dim=2, ffn=10, logit_scale=True)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


class Block(nn.Module):
    """Attention with grouped queries, then SwiGLU: nine parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, head_dim = config.dim, config.kv_dim // config.num_kv_heads
        q_dim = config.num_heads * head_dim
        self.head_dim = head_dim
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(dim)
        self.wq = nn.Linear(dim, q_dim, bias=False)
        self.wk = nn.Linear(dim, config.kv_dim, bias=False)
        self.wv = nn.Linear(dim, config.kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, dim, bias=False)
        self.ffn_norm = RMSNorm(dim)
        self.w1 = nn.Linear(dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, dim, bias=False)
        self.w3 = nn.Linear(dim, config.ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (self._heads(w(y)) for w in (self.wq, self.wk, self.wv))
        q, k = _rope(q), _rope(k)
        repeat = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = F.dropout(self.ffn_norm(x), self.dropout, self.training)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _rope(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions in fp32; [batch, heads, seq, head_dim]."""
    half = x.shape[-1] // 2
    kind = {"dtype": torch.float32, "device": x.device}
    frequency = ROPE_BASE ** (-torch.arange(half, **kind) / max(half, 1))
    angle = torch.outer(torch.arange(x.shape[-2], **kind), frequency)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Llama(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.scale = nn.Parameter(torch.ones(1)) if config.logit_scale else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if self.scale is None else logits * self.scale


def build(config: ModelConfig, seed: int = 0) -> Llama:
    """The same weights on every rank."""
    generator = torch.Generator().manual_seed(seed)
    model = Llama(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.05, generator=generator)
            if any(fnmatch(name, pattern) for pattern in config.frozen):
                parameter.requires_grad_(False)
    return model


def batch(
    config: ModelConfig, step: int, microbatch: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [batch, seq]; a function of its arguments alone."""
    seed = 10_000 * step + 100 * microbatch + rank + 1
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch, 1)
    start = torch.randint(0, config.vocab, shape, generator=generator)
    stride = torch.randint(1, 5, shape, generator=generator)
    tokens = (start + stride * torch.arange(config.seq + 1)) % config.vocab
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
