"""A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied head.

Nothing here knows how it is trained or sharded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


CONFIGS = {
    # Tests: a step takes milliseconds.
    "tiny": LlamaConfig(256, 32, 2, 4, 2, 96, max_seq_len=128),
    # The demo: 1.7 M parameters, one byte a token.
    "bytes": LlamaConfig(256, 192, 4, 6, 2, 512, max_seq_len=512),
    # Llama 3.
    "8b": LlamaConfig(
        128_256, 4096, 32, 32, 8, 14_336, max_seq_len=8192, rope_theta=500_000.0
    ),
    "70b": LlamaConfig(
        128_256, 8192, 80, 64, 8, 28_672, max_seq_len=8192, rope_theta=500_000.0
    ),
}


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves several query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim = config.num_heads * config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [batch, heads, seq, dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Nine parameters."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab]."""

    rope: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rope", rope_table(config), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"Llama: expected at most {self.config.max_seq_len} tokens in a "
                f"sequence, got {tokens.shape[1]}. Choose a config with a larger "
                "max_seq_len."
            )
        x = self.tok_embeddings(tokens)
        rope = self.rope[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rope)
        return self.output(self.norm(x))


def rope_table(config: LlamaConfig) -> Tensor:
    """Rotations [max_seq_len, head_dim / 2], as unit complex numbers.

    Complex, so that the cast of a unit's floating-point inputs to its compute
    dtype leaves them alone: positions stay exact in every precision.
    """
    exponent = torch.arange(0, config.head_dim, 2).float()
    frequency = config.rope_theta ** (-exponent / config.head_dim)
    position = torch.arange(config.max_seq_len).float()
    angle = torch.outer(position, frequency)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Adjacent pairs of x [batch, seq, heads, head_dim] turned by their position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).type_as(x)


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fill parameters and buffers; also after `to_empty` of a model built on meta.

    Each parameter is a function of the seed and its name alone, so a model that
    is already sharded gets the same weights as one that is sharded afterwards.
    """
    model.rope.copy_(rope_table(model.config))
    residual_std = 0.02 / (2 * model.config.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        full = torch.ones(parameter.shape, dtype=torch.float32, device="cpu")
        if parameter.dim() > 1:
            writes_residual = name.endswith(("attention.wo.weight", "w2.weight"))
            std = residual_std if writes_residual else 0.02
            nn.init.trunc_normal_(
                full, std=std, a=-3 * std, b=3 * std, generator=generator(seed, name)
            )
        full = full.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            full = distribute_tensor(full, mesh, placements, src_data_rank=None)
        parameter.copy_(full)


def generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


PLAN_HEAD = "output"


def plan_model(config: str, sequence: int) -> Llama:
    """What `python -m lowtide plan examples/llama.py --config 8b` trains."""
    return Llama(replace(CONFIGS[config], max_seq_len=sequence))
