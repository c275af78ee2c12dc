"""Peak reserved memory of flat_gradients.py's variants at the published widths on
CUDA: rank 0 of eight data-parallel ranks.  As JSON.

    flat_gradients_reserved.py lowtide [--expandable]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from flat_gradients import CONFIG, MICROBATCHES, VARIANTS, PerParameter
from stage import peaks, start

import lowtide
from support.model import Llama, ModelConfig, loss_fn

WIDTHS = {
    "published": replace(
        CONFIG, dim=8192, vocab=32064, kv_dim=256, ffn=7168, seq=1024, batch=4
    ),
    "tiny": CONFIG,
}
WORLD = 8
NUM_STEPS = 2  # the second is like all that follow


def model_of(config: ModelConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


def fill(model: torch.nn.Module) -> None:
    """As after a usual start: a product of zeros takes another time."""
    with torch.no_grad():
        for p in model.parameters():
            getattr(p, "_local_tensor", p).normal_(std=0.02)


def accumulate(model: Any, config: ModelConfig) -> None:
    for _ in range(MICROBATCHES):
        ids = torch.randint(config.vocab, (config.batch, config.seq))
        (loss_fn(model(ids), ids) / MICROBATCHES).backward()


def variant_step(name: str, config: ModelConfig) -> Callable[[], None]:
    model = model_of(config).bfloat16().to_empty(device="cuda")
    fill(model)
    # What a sharded run keeps of the parameters beside the full ones.
    numel = sum(p.numel() for p in model.parameters())
    shards = torch.empty(numel // WORLD, dtype=torch.bfloat16)
    variant: PerParameter = VARIANTS[name](model)

    def step(_shards: torch.Tensor = shards) -> None:
        variant.before_step()
        accumulate(model, config)
        handed = variant.hand_over()
        variant.sums = {}
        del handed

    return step


def lowtide_model(config: ModelConfig, **settings: Any) -> Any:
    """Gradients accumulate without a reduction; ``lowtide.abort_step`` drops them."""
    model: Any = model_of(config).bfloat16()
    policy = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = (*model.layers, model.embed, model.head, model)
    for module in units:
        lowtide.fully_shard(
            module, mp_policy=policy, reshard_after_forward=False, **settings
        )
    model.to_empty(device="cuda")
    fill(model)
    # The full parameters stay, as they do in the other variants.
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    return model


def run_steps(variant: str, config: ModelConfig) -> None:
    if variant not in LOWTIDE:
        step = variant_step(variant, config)
        for _ in range(NUM_STEPS):
            step()
        return
    model = lowtide_model(config, **LOWTIDE[variant])
    for _ in range(NUM_STEPS):
        accumulate(model, config)
        # Up to here the slab is what the reduce-scatter would take.
        lowtide.abort_step(model)


LOWTIDE: dict[str, dict[str, Any]] = {"lowtide": {}, "fused": {"grads": "fused"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=(*VARIANTS, *LOWTIDE))
    parser.add_argument("--expandable", action="store_true")
    parser.add_argument("--widths", choices=WIDTHS, default="published")
    args = parser.parse_args()
    start(WORLD, expandable=args.expandable)
    torch.set_default_device("cuda")
    run_steps(args.variant, WIDTHS[args.widths])
    print(json.dumps(peaks()))


if __name__ == "__main__":
    main()
