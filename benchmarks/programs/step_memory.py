"""Live bytes of forward and backward under the fake process group, as JSON.

    step_memory.py SYSTEM WORLD_SIZE DTYPES SIZE NUM_LAYERS

[Note: Exact live bytes]
The recorder sees releases on the caller's and autograd's threads.  gloo's workers
now and then drop the last reference to a tensor, unseen, which would count against
whoever hands torch's tensors to them: FSDP2.  The fake group has no threads, so
both systems' figures are exact and repeat to the byte; neither allocates
otherwise on gloo.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide
from lowtide import _C
from lowtide._base.memory import ledger
from support.extended import Float8Weight, extend
from support.model import ModelConfig, batch, build, loss_fn
from support.systems import System, get_system
from support.training import Run

CPU = torch.device("cpu")
DTYPES = {
    "fp32": (None, None),
    "bf16/fp32": (torch.bfloat16, torch.float32),
    # The blocks' matrices are a subclass that is gathered in float8 and dequantized by
    # its layer, for both systems alike.
    "float8/fp32": (torch.bfloat16, torch.float32),
}
TRANSIENT = ("gathered", "gather_input", "gradient_stream")
# From before the first step on: what a system keeps from step to step is seen too.
NUM_STEPS = 3


# Dim and ffn: blocks of 6.0 MiB in fp32 and of 80 MiB in bf16.
SIZES = {"small": (384, 1024), "large": (1920, 5120)}


def model_config(size: str, num_layers: int) -> ModelConfig:
    dim, ffn = SIZES[size]
    return ModelConfig(
        dim=dim,
        num_layers=num_layers,
        vocab=512,
        num_heads=dim // 64,
        num_kv_heads=dim // 192,
        kv_dim=dim // 192 * 64,
        ffn=ffn,
        seq=32,
        batch=1,
    )


def step(model: Any, config: ModelConfig) -> None:
    ids, targets = batch(config, 0, 0, 0)
    loss_fn(model(ids), targets).backward()


def record(system: System, run: Run, float8: bool) -> dict[str, Any]:
    """Bytes above the sharded parameters, in the last step."""
    model = build(run.model)
    if float8:
        extend(model.layers, Float8Weight)
    settings = {
        "mp_policy": system.MixedPrecisionPolicy(run.param_dtype, run.reduce_dtype)
    }
    for module in (*model.layers, model):
        system.fully_shard(module, **settings)
    gc.collect()
    # The timeline counts torch's allocations from its start on, and parameters are
    # older; lowtide's own bytes come from the ledger, with parameters.
    book = ledger(CPU) if system.name == "lowtide" else None
    older = book.live()["parameters"] if book is not None else 0
    with _C.AllocationTimeline(CPU, book, capacity=1 << 16) as timeline:
        for _ in range(NUM_STEPS - 1):
            step(model, run.model)
            model.zero_grad()
        first = timeline.samples()["event"][-1]
        if book is not None:
            book.reset_peaks()
        step(model, run.model)
    samples = timeline.samples()
    begin = samples["event"].index(first)
    del samples["event"], samples["nanoseconds"]
    total = samples.pop("total")
    at = max(range(begin, len(total)), key=total.__getitem__)
    samples.pop("parameters", None)
    recorded: dict[str, Any] = {
        "block": sum(p.numel() for p in model.layers[0].parameters()),
        "peak": total[at] - older,
        "at_peak": {name: values[at] for name, values in samples.items()},
        "before": total[begin] - older,
        "after": total[-1] - older,
    }
    if book is not None:
        categories = lowtide.memory_report(model).categories
        recorded["transient"] = sum(categories[name].peak for name in TRANSIENT)
        recorded["planned"] = sum(categories[name].planned for name in TRANSIENT)
    return recorded


def main() -> None:
    system, world_size, dtypes, model_size, num_layers = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = int(world_size)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    param, reduce = DTYPES[dtypes]
    config = model_config(model_size, int(num_layers))
    run = Run(config, ranks, param, reduce)
    float8 = dtypes.startswith("float8")
    print(json.dumps(record(get_system(system), run, float8)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
