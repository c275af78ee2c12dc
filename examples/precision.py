"""Which compute dtype this machine is fast in, by measurement."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from llama import Block, LlamaConfig, rope_table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def agreed_precision(device: torch.device) -> str:
    """Rank 0's choice, on every rank.  A collective."""
    choice = [faster_precision(device) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(choice, device=device)
    return choice[0]


def faster_precision(device: torch.device) -> str:
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # Without AMX or AVX512-bf16 a CPU emulates bf16, tens of times slower.
        bf16 = block_seconds(torch.bfloat16) < block_seconds(torch.float32)
    return "bf16" if bf16 else "fp32"


def block_seconds(dtype: torch.dtype) -> float:
    """Best time of forward and backward of one small block on the CPU."""
    config = LlamaConfig(256, 256, 1, 8, 4, 704, max_seq_len=128)
    block = Block(config).to(dtype)
    rope = rope_table(config)
    x = torch.ones(2, 128, config.dim, dtype=dtype, requires_grad=True)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        block(x, rope).sum().backward()
        times.append(time.perf_counter() - start)
    return min(times)
