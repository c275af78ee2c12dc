"""Training steps on CUDA for the dry runs over the dry driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import lowtide
from llama import CONFIGS, Llama
from lowtide.losses import linear_cross_entropy, stream_rows
from lowtide.phantom.dry import groups, lone_rank

Step = Callable[[], None]

WORLD = 8
SHAPE = (1, 33)
# Its attention's logsumexp is small beside the output, which can be saved by name.
TINY = replace(CONFIGS["tiny"], num_heads=2, num_kv_heads=1)


class LlamaWithLoss(Llama):
    chunking: str | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        if self.chunking is None:
            return super().forward(tokens).float().square().mean()
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rope[: tokens.shape[1]])
        x = self.norm(x)
        return linear_cross_entropy(x, self.output, targets, chunking=self.chunking)


class Experts(nn.Module):
    """Stacked matrices, each for as many tokens; ``mesh``: its ranks have a part of
    them each and exchange tokens."""

    NUM = 4

    def __init__(self, dim: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.router = nn.Linear(dim, self.NUM, bias=False)
        self.group = mesh.get_group() if mesh is not None else None
        here = self.NUM // (mesh.size() if mesh is not None else 1)
        matrices = torch.empty(here, dim, dim)
        if mesh is not None:
            matrices = DTensor.from_local(matrices, mesh, [Shard(0)], run_check=False)
        self.matrices = nn.Parameter(matrices)

    def exchanged(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        return dist_nn.all_to_all_single(torch.empty_like(x), x, group=self.group)

    def forward(self, x: Tensor) -> Tensor:
        weights, _ = self.router(x).softmax(-1).topk(1)
        matrices = self.matrices
        if isinstance(matrices, DTensor):
            matrices = matrices.to_local()
        parts = self.exchanged(x.flatten(0, 1)).unflatten(0, (len(matrices), -1))
        done = self.exchanged(torch.bmm(parts, matrices).flatten(0, 1))
        return done.view_as(x) * weights


def start(options: Any = None, *, bound: bool = True, backend: str = "nccl") -> None:
    """One rank of WORLD on NCCL; ``options``: ProcessGroupNCCL's; ``bound``: the group
    knows its device from the start; ``backend``: the name of torch's group."""
    lone_rank.replace_gloo()
    groups.install()  # torch 2.15 looks at the size of a part's communicator
    dist.init_process_group(
        backend,
        store=dist.HashStore(),
        rank=0,
        world_size=WORLD,
        device_id=torch.device("cuda", 0) if bound else None,
        pg_options=options,
    )
    torch.backends.cuda.enable_cudnn_sdp(False)


def give_experts(model: Any, *, parted: bool) -> dict[str, Any]:
    """In every layer; what shards them over the ranks that have the same ones."""
    of_parts, settings = None, {}
    if parted:
        shape = (dist.get_world_size() // 2, 2)
        both = init_device_mesh("cuda", shape, mesh_dim_names=("same", "parts"))
        of_parts = both["parts"]
        placed = lowtide.ShardPlacementResult(None, both["same"])
        settings["shard_placement_fn"] = lambda p: placed if p.dim() == 3 else None
    for layer in model.layers:
        with torch.device("meta"):
            layer.feed_forward = Experts(32, of_parts)
    return settings


def units_of(model: Any) -> list[Any]:
    return [*model.layers, model]


def sharded(
    *,
    microbatches: int = 1,
    grads: Literal["exact", "fused"] = "exact",
    policy: lowtide.ActivationPolicy | None = None,
    chunking: str | None = None,
    replicas: int = 1,
    reshard_after_forward: bool | int | None = None,
    read: bool = False,
    inputs: str = "cuda",
    compiled: bool = False,
    capturable: bool = False,
    unused: bool = False,
    as_zeros: bool = False,
    experts: Literal["stacked", "parted"] | None = None,
    optimized: bool = True,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Step:
    """A model of two layers; ``chunking``: of its head's loss, whose unit is the
    head's; ``read``: the host reads the loss; ``inputs``: the device they are on;
    ``unused``: each layer has an expert without tokens, whose gradient is reduced
    ``as_zeros``; ``experts``: each layer has some, all on every rank or a half of them
    on each of two, which are on a mesh of their own; ``optimized``: steps end with the
    optimizer's."""
    with torch.device("meta"):
        model: Any = LlamaWithLoss(TINY)
    model.chunking = chunking
    settings: dict[str, Any] = {
        "mp_policy": lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "grads": grads,
        "reshard_after_forward": reshard_after_forward,
    }
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        settings["mesh"] = init_device_mesh(
            "cuda", shape, mesh_dim_names=("replicate", "shard")
        )
    of_experts = give_experts(model, parted=experts == "parted") if experts else {}
    for layer in model.layers:
        if unused:
            layer.expert = nn.Linear(32, 32, bias=False, device="meta")
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        if policy is not None:
            lowtide.checkpoint(layer, policy)
        lowtide.fully_shard(layer, **settings, **of_experts)
    if chunking is not None:
        lowtide.fully_shard(model.output, **settings)
    lowtide.fully_shard(model, **settings)
    model.to_empty(device="cuda")
    model.set_reduce_scatter_unused_params(as_zeros)
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)
    tokens = torch.zeros(SHAPE, dtype=torch.long, device=inputs)

    def step() -> None:
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        lowtide.clip_grad_norm_(model.parameters(), 1.0)
        if experts != "parted":  # torch's raises at several meshes
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if optimized:
            optimizer.step()
            optimizer.zero_grad()
        if read:
            loss.item()

    return step


def name_attention(model: Any) -> None:
    for layer in model.layers:
        layer.attention.wo.register_forward_pre_hook(
            lambda _, args: (lowtide.tag(args[0], "attended"),)
        )


def drop_out(model: Any) -> None:
    for layer in model.layers:
        layer.feed_forward.register_forward_hook(
            lambda *call: nn.functional.dropout(call[-1], 0.1)
        )


def stream_head(model: Any) -> None:
    stream_rows(model.output)


class SequenceParallel(nn.Module):
    """Tokens [shard, 32] through a layer whose gathered input is gathered again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(64, 32))
        self.gate = nn.Parameter(torch.zeros(64, 32))
        self.down = nn.Parameter(torch.zeros(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        gathered = lowtide.sequence_parallel.sp_all_gather(x, group, name="plain")
        (up,) = lowtide.sequence_parallel.sp_gather_linear(
            x, [self.up], group=group, name="up"
        )
        hidden = torch.tanh(up) * (gathered @ self.gate.t())
        return x + lowtide.sequence_parallel.sp_reduce_scatter(
            hidden @ self.down.t(), group
        )


def sequence_parallel(*, capturable: bool = False) -> Step:
    model = nn.Sequential(*(SequenceParallel() for _ in range(3))).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)
    x = torch.zeros(16, 32, device="cuda")

    def step() -> None:
        with lowtide.sequence_parallel.gather_policy(regather="all", min_bytes=0):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


Policy = lowtide.ActivationPolicy
# What one step is; those with `capturable=True` may be captured.
KINDS: dict[str, Callable[..., Step]] = {
    "each backward reduces": sharded,
    "two microbatches without sync": partial(sharded, microbatches=2),
    "replicated": partial(sharded, replicas=2),
    "checkpointed": partial(sharded, policy=Policy()),
    "checkpointed, dropout": partial(sharded, policy=Policy(), prepare=drop_out),
    "offloaded": partial(sharded, policy=Policy(offload=["input"])),
    "offloaded and saved": partial(
        sharded,
        policy=Policy(offload=["input"], save=["attended"]),
        prepare=name_attention,
    ),
    "loss in chunks of tokens": partial(sharded, chunking="tokens"),
    "loss in chunks of a streamed head": partial(
        sharded, chunking="vocabulary", prepare=stream_head
    ),
    "fused": partial(sharded, grads="fused"),
    "fused, two microbatches without sync": partial(
        sharded, grads="fused", microbatches=2
    ),
    "fused, loss in chunks of a streamed head": partial(
        sharded, grads="fused", chunking="vocabulary", prepare=stream_head
    ),
    "fused and compiled": partial(sharded, grads="fused", compiled=True),
    "sequence parallel": sequence_parallel,
    "unused parameters": partial(sharded, unused=True),
    "unused parameters as zeros": partial(sharded, unused=True, as_zeros=True),
    "stacked experts": partial(sharded, experts="stacked"),
    "stacked experts, checkpointed": partial(
        sharded, experts="stacked", policy=Policy()
    ),
    "experts on a mesh of their own": partial(sharded, experts="parted"),
    "read back": partial(sharded, read=True),
    "inputs from the host": partial(sharded, inputs="cpu"),
}
