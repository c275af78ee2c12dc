"""torch's `context_parallel` around sharded models, whose shards lie on the ranks of
data and context together, and tensor parallelism beside it: the bits of FSDP2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import lowtide
from support import context_parallel as on_cpus
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import get_system

TOKENS, DIM, HEADS, VOCABULARY = 16, 16, 4, 32
SLOW = pytest.mark.slow
STEPS, MICROBATCHES = 3, 2

# Sizes of the mesh's dimensions.
MESHES: dict[str, dict[str, int]] = {
    "cp": {"replicate": 1, "shard": 1, "cp": 2, "tp": 1},
    "shards and cp": {"replicate": 1, "shard": 2, "cp": 2, "tp": 1},
    "replicas and cp": {"replicate": 2, "shard": 1, "cp": 2, "tp": 1},
    "cp and tp": {"replicate": 1, "shard": 1, "cp": 2, "tp": 2},
    "replicas, shards and tp": {"replicate": 2, "shard": 2, "cp": 1, "tp": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = QKV()
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for one in self.qkv(self.norm(x))
        )
        q, k = q * positions, k * positions
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


# As torchtitan: outside of products a rank has some tokens, at the end some words.
TENSOR_PARALLEL: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.qkv": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    **{f"layers.*.qkv.{name}": ColwiseParallel() for name in "qkv"},
    "layers.*.out": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


class QKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.q(x), self.k(x), self.v(x)]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        # The context leaves each rank its part of the rows.
        self.register_buffer("positions", torch.randn(TOKENS, DIM // HEADS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.positions)
        return self.head(x)


def sharded(system_name: str, mesh: DeviceMesh, how: str) -> Any:
    system = get_system(system_name)
    torch.manual_seed(0)
    model = Transformer()
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    flat = mesh["shard", "cp"]._flatten("shard_cp")
    data = flat if mesh["replicate"].size() == 1 else mesh["replicate", "shard_cp"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for i, layer in enumerate(model.layers):
        if how == "region" and system_name == "lowtide":
            lowtide.checkpoint(layer, lowtide.ActivationPolicy())
        elif how != "plain":
            model.layers[i] = checkpoint_wrapper(layer)
    for module in (*model.layers, model):
        system.fully_shard(module, mesh=data, mp_policy=policy)
    system.prepare(model)
    return model


def batch(mesh: DeviceMesh, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole sequences, the same on all ranks of a context."""
    replica = mesh["replicate"].get_local_rank() * mesh["shard"].size()
    seed = 100 * step + replica + mesh["shard"].get_local_rank()
    size = (2, TOKENS + 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, size, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(system_name: str, mesh_name: str, how: str, rotate: str) -> Record:
    on_cpus.prepare()
    set_rotate_method(rotate)
    sizes = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = sharded(system_name, mesh, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            model.set_requires_gradient_sync(last or sizes["tp"] > 1)
            tokens, labels = batch(mesh, MICROBATCHES * step + microbatch)
            in_context = context_parallel(
                mesh["cp"],
                buffers=[tokens, labels, model.positions],
                buffer_seq_dims=[1, 1, 0],
                no_restore_buffers={tokens, labels},
            )
            with in_context, loss_parallel():
                logits = model(tokens).float()
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                loss.backward()
            record.add("loss", loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        record.add("norm", norm)
        for name, p in model.named_parameters():
            record.add(name.replace("_checkpoint_wrapped_module.", ""), p.grad)
        record.add("positions", model.positions)
        optimizer.step()
        optimizer.zero_grad()
    return record.values


# How a block is computed again, and how keys go round; on two ranks and on four.
CASES = [
    ("cp", "region", "alltoall"),
    ("shards and cp", "checkpointed", "allgather"),
    pytest.param("replicas and cp", "plain", "alltoall", marks=SLOW),
    ("cp and tp", "region", "allgather"),
    pytest.param("replicas, shards and tp", *("plain", "allgather"), marks=SLOW),
]


@pytest.mark.parametrize(("mesh", "how", "rotate"), CASES)
def test_training_equals_fsdp2(pool_of, mesh, how, rotate):
    pool = pool_of(math.prod(MESHES[mesh].values()))
    assert_trains_as_fsdp2(pool, train, mesh, how, rotate)
