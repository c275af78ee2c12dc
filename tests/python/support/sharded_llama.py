"""A sharded training run of the example's Llama on any device, recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from llama import Llama, LlamaConfig, init_weights
from support.systems import get_system

# 101 and 42 rows do not divide by two, and two key rows leave a third rank none.
UNEVEN = LlamaConfig(101, 32, 2, 4, 2, 42, max_seq_len=64)


@dataclass(frozen=True)
class ShardedRun:
    system: str  # lowtide or fsdp2
    param_dtype: torch.dtype | None = torch.bfloat16
    microbatches: int = 1
    sync: str = "each"  # gradients reduced after "each" microbatch or the "last"
    num_steps: int = 3


def train(device: str, run: ShardedRun) -> dict[str, list[Any]]:
    """Losses, gradient norms, gradients and parameters of this rank, on the CPU."""
    system = get_system(run.system)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = Llama(UNEVEN)
    init_weights(model, seed=1)
    policy = system.MixedPrecisionPolicy(run.param_dtype, torch.float32)
    for unit in (model.tok_embeddings, *model.layers, model):
        system.fully_shard(unit, mesh=mesh, mp_policy=policy)
    model.rope = model.rope.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    trace: dict[str, list[Any]] = {"losses": [], "norms": [], "grads": [], "params": []}
    for step in range(run.num_steps):
        for microbatch in range(run.microbatches):
            if run.sync == "last":
                model.set_requires_gradient_sync(microbatch == run.microbatches - 1)
            batch = tokens(step, microbatch).to(device)
            logits = model(batch[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / run.microbatches).backward()
            trace["losses"].append(loss.item())
        trace["grads"].append([local(p.grad) for p in model.parameters()])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        assert isinstance(norm, DTensor)
        trace["norms"].append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        trace["params"].append([local(p) for p in model.parameters()])
    return trace


def tokens(step: int, microbatch: int) -> torch.Tensor:
    seed = 1000 * step + 10 * microbatch + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(UNEVEN.vocab_size, (2, 25), generator=generator)


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local().cpu().clone()


def differences(mine: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> list[str]:
    """What differs in any bit; compares nothing that is not there in both."""
    found = [what for what in ("losses", "norms") if mine[what] != theirs[what]]
    for what in ("grads", "params"):
        for step, (a, b) in enumerate(zip(mine[what], theirs[what], strict=True)):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                if x.dtype != y.dtype or not torch.equal(x, y):
                    found.append(f"{what} of step {step}, parameter {i}")
    return found
