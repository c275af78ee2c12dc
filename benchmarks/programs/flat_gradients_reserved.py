"""Peak reserved memory of flat_gradients.py's variants at the published widths, on the
simulated device: rank 0 of eight data-parallel ranks.  As JSON.

    flat_gradients_reserved.py lowtide [--expandable]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
from flat_gradients import CONFIG, MICROBATCHES, VARIANTS, PerParameter

import lowtide.phantom
from support.model import Llama, ModelConfig, loss_fn

WIDTHS = replace(CONFIG, dim=8192, vocab=32064, kv_dim=256, ffn=7168, seq=1024, batch=4)
WORLD = 8
NUM_STEPS = 2  # the second is like all that follow


def model_of(config: ModelConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


def accumulate(model: Any) -> None:
    shape = (WIDTHS.batch, WIDTHS.seq)
    for _ in range(MICROBATCHES):
        ids = torch.zeros(shape, dtype=torch.long)
        (loss_fn(model(ids), ids) / MICROBATCHES).backward()


def run_variant(name: str) -> None:
    model = model_of(WIDTHS).bfloat16().to_empty(device="phantom")
    # What a sharded run keeps of the parameters beside the full ones.
    numel = sum(p.numel() for p in model.parameters())
    shards = torch.empty(numel // WORLD, dtype=torch.bfloat16)
    variant: PerParameter = VARIANTS[name](model)
    for _ in range(NUM_STEPS):
        variant.before_step()
        accumulate(model)
        handed = variant.hand_over()
        variant.sums = {}
        del handed
    del shards


def run_lowtide() -> None:
    model: Any = model_of(WIDTHS).bfloat16()
    policy = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = (*model.layers, model.embed, model.head, model)
    for module in units:
        lowtide.fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device="phantom")
    # The full parameters stay, as they do in the other variants.
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for _ in range(NUM_STEPS):
        accumulate(model)
        # Up to here the slab is what the reduce-scatter would take.
        lowtide.abort_step(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=(*VARIANTS, "lowtide"))
    parser.add_argument("--expandable", action="store_true")
    args = parser.parse_args()
    lowtide.phantom.install(mode="meta", expandable=args.expandable)
    lowtide.phantom.init_world(WORLD)
    torch.set_default_device("phantom")
    if args.variant == "lowtide":
        run_lowtide()
    else:
        run_variant(args.variant)
    accelerator = torch.accelerator
    peaks = {
        "reserved": accelerator.max_memory_reserved(),
        "allocated": accelerator.max_memory_allocated(),
    }
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
