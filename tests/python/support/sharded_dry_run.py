"""Sharded training of Llama shapes for its allocations only, on ``cuda`` over the
dry driver or on ``phantom``: nothing is computed, the world is not there.

    python sharded_dry_run.py run.json   ShardedDryRun on cuda, prints its Measured
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from llama import Llama, LlamaConfig
from support.systems import get_system


@dataclass(frozen=True)
class ShardedDryRun:
    system: str = "fsdp2"
    world: int = 8
    config: LlamaConfig = LlamaConfig(32000, 2048, 4, 16, 4, 5632, max_seq_len=4096)
    num_steps: int = 3
    checkpointed: bool = True


@dataclass(frozen=True)
class Measured:
    """Bytes at their peak in each step."""

    allocated: list[int]
    reserved: list[int]
    snapshot: dict[str, Any] | None = None  # on cuda


def train_dry(device: str, run: ShardedDryRun) -> Measured:
    """Needs a process group of ``run.world`` ranks whose collectives do nothing."""
    system = get_system(run.system)
    mesh = init_device_mesh(device, (run.world,))
    with torch.device("meta"):
        model = Llama(run.config)
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in (model.tok_embeddings, *model.layers, model):
        system.fully_shard(unit, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    measured = Measured([], [])
    for _ in range(run.num_steps):
        torch.accelerator.reset_peak_memory_stats()
        tokens = torch.zeros(1, run.config.max_seq_len + 1, dtype=torch.long).to(device)
        loss_of(model, tokens, run.checkpointed).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        measured.allocated.append(torch.accelerator.max_memory_allocated())
        measured.reserved.append(torch.accelerator.max_memory_reserved())
    return measured


def loss_of(model: Llama, tokens: torch.Tensor, checkpointed: bool) -> torch.Tensor:
    if checkpointed:
        for layer in model.layers:
            if not hasattr(layer, "run"):
                layer.run = layer.forward
                layer.forward = lambda *a, run=layer.run: checkpoint(
                    run, *a, use_reentrant=False
                )
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings = json.loads(sys.argv[1])
    run = ShardedDryRun(**settings | {"config": LlamaConfig(**settings["config"])})
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    torch.backends.cuda.enable_cudnn_sdp(False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.world)
    measured = train_dry("cuda", run)
    snapshot = torch.cuda.memory._snapshot()
    print(json.dumps(asdict(measured) | {"snapshot": snapshot}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
