"""Language models and single layers that others measured on real GPUs, written after
their descriptions (published.py runs them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from published_support import peaks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 16


# -- GPT-2, step by step from plain code to fused and compiled kernels -----------------


class PlainAttention(nn.Module):
    """Three projections, scores in full, a mask kept or made anew."""

    def __init__(self, width: int, context: int, *, kept_mask: bool) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        if kept_mask:
            mask = torch.triu(torch.ones(context, context), diagonal=1)
            self.register_buffer("mask", mask)
        else:
            self.mask = None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        key, query, value = (
            part(x).view(batch, tokens, 12, width // 12).transpose(1, 2)
            for part in (self.key, self.query, self.value)
        )
        scores = query @ key.transpose(2, 3)
        if self.mask is None:
            ones = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device)
            hidden = torch.triu(ones, diagonal=1)
        else:
            hidden = self.mask.bool()[:tokens, :tokens]
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1)
        mixed = (self.dropout(weights) @ value).transpose(1, 2)
        return self.out(mixed.reshape(batch, tokens, width))


class FlashAttention(nn.Module):
    """One projection and torch's own attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, 12, width // 12)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        mixed = mixed.transpose(1, 2).contiguous().view(batch, tokens, width)
        return self.out(mixed)


class PlainNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class PlainGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (
            x + 0.044715 * torch.pow(x, 3)
        )
        return 0.5 * x * (1 + torch.tanh(inner))


class GptBlock(nn.Module):
    def __init__(self, width: int, context: int, stage: int) -> None:
        super().__init__()
        norm = nn.LayerNorm if stage >= 6 else PlainNorm
        gelu = nn.GELU(approximate="tanh") if stage >= 6 else PlainGelu()
        self.attention = (
            FlashAttention(width)
            if stage >= 7
            else PlainAttention(width, context, kept_mask=stage < 1)
        )
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.feed_forward = nn.Sequential(up, gelu, down)
        self.norm1, self.norm2 = norm(width), norm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.feed_forward(x)
        x = self.dropout(x)
        return x + shortcut


class Gpt2(nn.Module):
    def __init__(self, vocabulary: int, context: int, stage: int) -> None:
        super().__init__()
        width = 768
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.1)
        blocks = (GptBlock(width, context, stage) for _ in range(12))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width) if stage >= 6 else PlainNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))


def gpt2(
    stage: int, vocabulary: int = 50257, batch: int = 8, ranks: int = 1
) -> dict[str, int]:
    """The first epoch: steps, an evaluation of two batches every fifteen of them, and
    fifty tokens written one by one. ``stage`` counts the source's changes; with more
    than one of ``ranks`` the model is DDP's, evaluated every five steps."""
    context = 1024
    every = 15 if ranks == 1 else 5
    # A tenth of the text has 46 or 47 contexts: of four ranks each has 12.
    evaluated = batch if ranks == 1 else 12
    if ranks > 1:
        dist.init_process_group("nccl")
    model: Any = Gpt2(vocabulary, context, stage)
    if stage >= 2:
        torch.set_float32_matmul_precision("high")
    if stage >= 8:
        model = torch.compile(model)
    model.to("cuda")
    if stage >= 5:
        model.to(torch.bfloat16)
    if ranks > 1:
        model = DistributedDataParallel(model, device_ids=[0])
    fused = {"fused": True} if stage >= 3 else {}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=5e-4, weight_decay=0.1, **fused
    )

    def loss(rows: int = batch) -> Tensor:
        tokens = torch.randint(0, 50257, (rows, context))
        tokens, targets = tokens.to("cuda"), tokens.clone().to("cuda")
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model.train()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        one = loss()
        one.backward()
        optimizer.step()
        if step % every == 0:
            model.eval()
            with torch.no_grad():
                loss().item(), loss(evaluated).item()
            model.train()
    model.eval()
    text = torch.zeros(1, 4, dtype=torch.long, device="cuda")
    with torch.no_grad():
        for _ in range(50):
            logits = model(text)[:, -1, :]
            text = torch.cat((text, torch.argmax(logits, dim=-1, keepdim=True)), dim=1)
    return peaks()


# -- single losses and norms ----------------------------------------------------------


def repeat(step: Callable[[], None]) -> dict[str, int]:
    """What the tenth of ten takes; gradients add up."""
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        step()
    return peaks()


def cross_entropy(vocabulary: int, rows: int = 16384) -> dict[str, int]:
    logits = torch.randn(rows, vocabulary, requires_grad=True, device="cuda")
    target = torch.randint(vocabulary, (rows, 1), device="cuda").squeeze(1)
    loss = nn.CrossEntropyLoss()
    return repeat(lambda: loss(logits, target).backward())


def kl_div(vocabulary: int, rows: int = 16384) -> dict[str, int]:
    leaf = torch.randn(rows, vocabulary, requires_grad=True, device="cuda")
    scores = leaf.log_softmax(dim=-1)
    del leaf
    target = torch.randn(rows, vocabulary, device="cuda").softmax(dim=-1)
    loss = nn.KLDivLoss(reduction="batchmean")
    return repeat(lambda: loss(scores, target).backward(retain_graph=True))


def layer_norm(width: int, rows: int = 4096) -> dict[str, int]:
    norm = nn.LayerNorm(width, eps=1e-6, device="cuda")
    other = nn.LayerNorm(width, eps=1e-6, device="cuda")  # the source makes both
    x = torch.randn(rows, width, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    found = repeat(lambda: norm(x).backward(gradient, retain_graph=True))
    del other
    return found
