"""Step time of a slice of a Llama on one GPU, lowtide and FSDP2 step by step in turns,
as JSON. World 1 on NCCL: lowtide's collectives are the group's copies on the device;
FSDP2 issues none there, and copies its shards itself.

    llama_speed.py --num-layers 8 --loss chunked:16

Options are those of llama_memory.py; plain SGD, because two models with Adam's state do
not fit.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from llama_memory import build as build_model
from llama_memory import parser, shard_by_unit
from stage import start_real_ranks
from timing import in_turns, ratio
from torch import nn

from llama import rope_table

SYSTEMS = ("fsdp2", "lowtide")


def options() -> Namespace:
    base = parser()
    base.set_defaults(device="cuda")
    base.add_argument("--rounds", type=int, default=8)
    return base.parse_args()


def build(
    args: Namespace, system: str, prepare: Callable[[Any], None] = lambda model: None
) -> Any:
    """The same parameters for every system; ``prepare`` comes before sharding."""
    args = argparse.Namespace(**vars(args) | {"system": system})
    torch.manual_seed(0)
    model: Any = build_model(args)
    prepare(model)
    model = shard_by_unit(model, args)
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local()
            local.fill_(1) if p.dim() == 1 else local.normal_(std=0.02)
        model.rope.copy_(rope_table(model.config))
    return model


def step_of(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def flops(model: nn.Module, sequence: int) -> int:
    """Of a step without what is computed again: 6 a parameter and token, less the
    embedding, and causal attention."""
    layers: Any = model.layers
    dim = layers[0].attention.wq.weight.shape[0]
    weights = sum(p.numel() for p in model.parameters())
    weights -= model.tok_embeddings.weight.numel()  # type: ignore[union-attr, operator]
    return 6 * weights * sequence + 6 * len(layers) * dim * sequence**2


def main() -> None:
    args = options()
    start_real_ranks()
    models = {system: build(args, system) for system in SYSTEMS}
    vocabulary = models["lowtide"].tok_embeddings.weight.shape[0]
    shape = (1, args.sequence + 1)
    tokens = torch.randint(vocabulary, shape, device="cuda")
    steps = {system: step_of(model, tokens) for system, model in models.items()}
    times = in_turns(steps, rounds=args.rounds, warm_up=2)
    figures = {
        "ms": times,
        "ratio": ratio(times["lowtide"], times["fsdp2"]),
        "flops": flops(models["lowtide"], args.sequence),
    }
    print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
