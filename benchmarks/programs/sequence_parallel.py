"""Blocks of a Llama as one rank of a tensor- and sequence-parallel group runs them:
what is held between forward and backward, collectives, bits.

    python -m lowtide phantom --world SIZE -- \\
        sequence_parallel.py CONFIG SIZE SEQUENCE

prints JSON, every system with two and with three blocks.  `train` runs on gloo.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from stage import start
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lowtide
from lowtide._gather.axes import axis_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from llama import CONFIGS, LlamaConfig, rope_table, rotate

LOWTIDE, SAVED = "lowtide", "gather saved"
CHECKPOINT, SELECTIVE = "torch checkpoint", "torch checkpoint, SAC: products kept"
SYSTEMS = (LOWTIDE, SAVED, CHECKPOINT, SELECTIVE)
SITES = ("attn_in", "ffn_in")
# cuBLAS then takes none: until torch 2.14 each thread and stream keeps one, from 2.15
# on a product has one while it runs.
NO_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}

# What selective checkpointing keeps, as most recipes do: products and attention.
aten = torch.ops.aten
KEPT = (
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def products_kept() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Block(nn.Module):
    """One rank's part; token-major: [seq / size, batch, dim] in and out."""

    def __init__(self, config: LlamaConfig, group: Any, torch_collectives: bool):
        super().__init__()
        self.group, self.head_dim = group, config.head_dim
        self.torch_collectives = torch_collectives
        size = group.size()
        q = config.num_heads * config.head_dim // size
        kv = config.num_kv_heads * config.head_dim // size
        ffn = config.ffn_dim // size
        self.attention_norm = nn.RMSNorm(config.dim)
        self.ffn_norm = nn.RMSNorm(config.dim)
        linear = partial(nn.Linear, bias=False)
        self.wq, self.wk, self.wv = (linear(config.dim, n) for n in (q, kv, kv))
        self.wo = linear(q, config.dim)
        self.w1, self.w3 = linear(config.dim, ffn), linear(config.dim, ffn)
        self.w2 = linear(ffn, config.dim)

    def linears(self, x: Tensor, layers: list[nn.Linear], name: str) -> Any:
        weights = [layer.weight for layer in layers]
        if not self.torch_collectives:
            return lowtide.sequence_parallel.sp_gather_linear(
                x, weights, group=self.group, name=name
            )
        whole = all_gather_tensor_autograd(x, 0, self.group)
        return [F.linear(whole, weight) for weight in weights]

    def scatter(self, partial_sum: Tensor) -> Tensor:
        if not self.torch_collectives:
            return lowtide.sequence_parallel.sp_reduce_scatter(partial_sum, self.group)
        return reduce_scatter_tensor_autograd(partial_sum, "sum", 0, self.group)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        qkv = self.linears(normed, [self.wq, self.wk, self.wv], "attn_in")
        del normed
        q, k, v = (t.transpose(0, 1).unflatten(-1, (-1, self.head_dim)) for t in qkv)
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.scatter(self.wo(y.permute(2, 0, 1, 3).flatten(2)))
        gate, up = self.linears(self.ffn_norm(x), [self.w1, self.w3], "ffn_in")
        return x + self.scatter(self.w2(F.silu(gate) * up))


def run(system: str, blocks: list[Block], x: Tensor, rope: Tensor) -> Tensor:
    again = SITES if system == LOWTIDE else ()
    extra = {"context_fn": products_kept} if system == SELECTIVE else {}
    with lowtide.sequence_parallel.gather_policy(regather=again, min_bytes=0):
        for block in blocks:
            if system in (CHECKPOINT, SELECTIVE):
                x = checkpoint(block, x, rope, use_reentrant=False, **extra)
            else:
                x = block(x, rope)
    return x


# -- on CUDA -------------------------------------------------------------------------


def held(system: str, config: LlamaConfig, layers: int, sequence: int) -> Any:
    """Bytes on the device, beyond parameters and the input: between forward and
    backward, and at the highest in backward."""
    group, size = dist.group.WORLD, dist.get_world_size()
    device = torch.device("cuda")
    # Operators that SAC must see are torch's.
    torch_collectives = system == SELECTIVE
    blocks = [
        Block(config, group, torch_collectives).to(device, torch.bfloat16)
        for _ in range(layers)
    ]
    shape = (sequence // size, 1, config.dim)
    x = torch.empty(shape, dtype=torch.bfloat16, device=device).requires_grad_()
    rope = rope_table(config)[:sequence].to(device)
    before = torch.accelerator.memory_allocated()
    y = run(system, blocks, x, rope)
    live = torch.accelerator.memory_allocated() - before - y.nbytes
    torch.accelerator.reset_peak_memory_stats()
    y.backward(torch.empty_like(y))
    peak = torch.accelerator.max_memory_allocated() - before
    return {"held": live, "peak": peak}


def simulate(config: str, size: int, sequence: int) -> Any:
    os.environ |= NO_WORKSPACES
    start(size)
    found: dict[str, list[Any]] = {}
    for system in SYSTEMS:
        for layers in (2, 3):
            gc.collect()
            figures = held(system, CONFIGS[config], layers, sequence)
            found.setdefault(system, []).append(figures)
    return found


# -- on gloo ------------------------------------------------------------------------

SMALL = LlamaConfig(64, 64, 2, 8, 4, 96, max_seq_len=32)


class TorchCollectives(TorchDispatchMode):
    """Counts torch's functional collectives, in backward and recomputations too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"all_gather_into_tensor": 0, "reduce_scatter_tensor": 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "_c10d_functional":
            name = func.overloadpacket.__name__
            if name in self.calls:
                self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Any], axis: Any) -> tuple[Any, dict[str, int]]:
    """What ``call`` returns, and the collectives it issued, lowtide's and torch's."""
    axis.reset_counters()
    with TorchCollectives() as torchs:
        result = call()
    ours = {kind: calls for kind, (calls, _) in axis.counters.items()}
    gathers = torchs.calls["all_gather_into_tensor"]
    scatters = torchs.calls["reduce_scatter_tensor"]
    return result, {
        "all-gathers": ours["all-gather"] + gathers,
        "reduce-scatters": ours["reduce-scatter"] + scatters,
    }


def train(system: str, dtype: torch.dtype, torch_collectives: bool) -> dict[str, Any]:
    """Two steps of two blocks; the second one's digest and collectives."""
    assert dist.group.WORLD is not None
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(rank)
    blocks = [Block(SMALL, group, torch_collectives).to(dtype) for _ in range(2)]
    rope = rope_table(SMALL)
    axis = axis_of(group, torch.device("cpu"))
    from lowtide._gather.axes import collectives_of

    counters = collectives_of(group, torch.device("cpu"))
    bits = hashlib.sha256()
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    for _ in range(2):
        shape = (SMALL.max_seq_len // group.size(), 2, SMALL.dim)
        x = torch.randn(shape).to(dtype).requires_grad_()
        axis.reset_figures()
        y, forward = counted(partial(run, system, blocks, x, rope), counters)
        loss = y.float().square().mean()
        _, backward = counted(loss.backward, counters)
        gradients = [x.grad, *(p.grad for b in blocks for p in b.parameters())]
        for tensor in (loss, *gradients):
            bits.update(tensor.detach().float().numpy().tobytes())
        for block in blocks:
            block.zero_grad()
    figures = axis.figures()
    return {
        "digest": bits.hexdigest(),
        "forward": forward,
        "backward": backward,
        "regathers": {
            name: figures[name]["regathers"] if name in figures else 0 for name in SITES
        },
    }


def main() -> None:
    config, *numbers = sys.argv[1:]
    print(json.dumps(simulate(config, *map(int, numbers))))


if __name__ == "__main__":
    main()
