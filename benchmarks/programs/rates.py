"""Times of single operators at the shapes of Llama-8B, as JSON: {name: milliseconds}.

    rates.py TOKENS ROUNDS

Over the dry driver with a timeline (clocked.py) the same names have simulated times;
what a GPU says beside them is how far lowtide.phantom.machines is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from timing import in_turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH, HIDDEN, VOCABULARY = 4096, 14336, 128256
HEADS, HEAD_WIDTH = 32, 128
MANY = 256  # kernels of next to nothing in a row
Actions = dict[str, Callable[[], object]]


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Not zeros, on which a GPU is faster."""
    return torch.randn(shape, dtype=dtype, device="cuda")


def products(tokens: int) -> Actions:
    """Forward, the input's gradient and the weight's of the linear layers."""
    actions: Actions = {}
    for name, width, out, dtype in (
        ("attention", WIDTH, WIDTH, BF16),
        ("up", WIDTH, HIDDEN, BF16),
        ("down", HIDDEN, WIDTH, BF16),
        ("head", WIDTH, VOCABULARY, BF16),
        ("attention, fp32", WIDTH, WIDTH, FP32),
    ):
        x, weight = random(tokens, width, dtype=dtype), random(out, width, dtype=dtype)
        gradient = random(tokens, out, dtype=dtype)
        actions |= {
            f"product: {name}, forward": lambda x=x, w=weight: x @ w.t(),
            f"product: {name}, input": lambda g=gradient, w=weight: g @ w,
            f"product: {name}, weight": lambda g=gradient, x=x: g.t() @ x,
        }
    return actions


def attention(tokens: int) -> Actions:
    actions: Actions = {}
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        q, k, v = (
            random(1, HEADS, tokens, HEAD_WIDTH).requires_grad_() for _ in range(3)
        )
        gradient = random(1, HEADS, tokens, HEAD_WIDTH)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, b=backend) -> Tensor:
            with sdpa_kernel(b):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        inputs = (q, k, v)
        actions[f"attention: {name}, forward"] = forward
        actions[f"attention: {name}, backward"] = lambda o=out, i=inputs, g=gradient: (
            torch.autograd.grad(o, i, g, retain_graph=True)
        )
    return actions


def elementwise(tokens: int) -> Actions:
    """What moves bytes."""
    x, y = random(tokens, HIDDEN), random(tokens, HIDDEN)
    wide = random(tokens, WIDTH)
    scale = random(WIDTH)
    logits = random(tokens // 4, VOCABULARY, dtype=FP32)
    targets = torch.randint(VOCABULARY, (tokens // 4,), device="cuda")
    table = random(VOCABULARY, WIDTH)
    single = random(tokens * WIDTH, dtype=FP32)
    return {
        "bytes: copy, bf16": lambda: torch.empty_like(x).copy_(x),
        "bytes: add, bf16": lambda: x + y,
        "bytes: silu, bf16": lambda: F.silu(x),
        "bytes: cast, bf16 to fp32": lambda: x.float(),
        "bytes: fill, fp32": lambda: single.zero_(),
        "bytes: RMSNorm, bf16": lambda: F.rms_norm(wide, (WIDTH,), scale),
        "bytes: softmax, fp32": lambda: torch.softmax(logits, -1),
        "bytes: cross entropy, fp32": lambda: F.cross_entropy(logits, targets),
        "bytes: norm, fp32": lambda: torch.linalg.vector_norm(single),
        "bytes: embedding, bf16": lambda: F.embedding(targets, table),
        "bytes: transpose, bf16": lambda: x.t().contiguous(),
    }


def optimizers(tokens: int) -> Actions:
    """A step of fused AdamW, of few large tensors and of many small ones."""
    actions: Actions = {}
    for name, shape, count in (
        ("16 matrices", (tokens // 2, WIDTH), 16),
        ("512 vectors", (WIDTH,), 512),
    ):
        parameters = [
            torch.nn.Parameter(random(*shape, dtype=FP32)) for _ in range(count)
        ]
        for p in parameters:
            p.grad = random(*shape, dtype=FP32)
        actions[f"optimizer: fused AdamW, {name}"] = torch.optim.AdamW(
            parameters, fused=True
        ).step
    return actions


def small() -> Actions:
    """Bound by the host, and in a graph by what lies between two kernels."""
    x = random(64)

    def launches() -> None:
        for _ in range(MANY):
            x.add_(1)

    launches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    return {
        f"small: {MANY} additions": launches,
        f"small: {MANY} additions in a graph": graph.replay,
    }


def main() -> None:
    tokens, rounds = map(int, sys.argv[1:3])
    torch.backends.cuda.matmul.allow_tf32 = False
    figures: dict[str, float] = {}
    for make in (products, attention, elementwise, optimizers):
        times = in_turns(make(tokens), rounds=rounds, warm_up=2)
        figures |= {name: median(ms) for name, ms in times.items()}
    times = in_turns(small(), rounds=rounds, warm_up=2)
    figures |= {name: median(ms) for name, ms in times.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
