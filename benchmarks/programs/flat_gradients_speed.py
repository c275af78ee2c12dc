"""Time of a step of flat_gradients.py's variants on a GPU, in turns, as JSON: four
microbatches up to where the input of the reduce-scatter is there; one rank on NCCL.

    flat_gradients_speed.py [--widths tiny]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from flat_gradients import MICROBATCHES, VARIANTS
from flat_gradients_reserved import (
    LOWTIDE,
    WIDTHS,
    accumulate,
    lowtide_model,
    model_of,
    variant_step,
)
from stage import start_real_ranks
from timing import in_turns

import lowtide
from support.model import ModelConfig


def flops(config: ModelConfig) -> int:
    """Of a step: 6 a parameter and token, less the embedding, and full attention."""
    model = model_of(config)
    weights = sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()
    tokens = MICROBATCHES * config.batch * config.seq
    width = config.num_heads * (config.kv_dim // config.num_kv_heads)
    return 6 * tokens * (weights + 2 * config.num_layers * width * config.seq)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", choices=WIDTHS, default="published")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    config = WIDTHS[args.widths]
    start_real_ranks()
    torch.set_default_device("cuda")
    models: dict[str, Any] = {
        name: lowtide_model(config, **settings) for name, settings in LOWTIDE.items()
    }
    steps = {name: variant_step(name, config) for name in VARIANTS}
    steps |= {
        name: partial(accumulate, model, config) for name, model in models.items()
    }

    def drop_gradients(name: str) -> None:
        if name in models:
            lowtide.abort_step(models[name])

    times = in_turns(steps, rounds=args.rounds, warm_up=2, after=drop_gradients)
    print(json.dumps({"ms": times, "flops": flops(config)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
