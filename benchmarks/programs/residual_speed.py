"""The residual's stack at the report's size on a GPU, as JSON: peak bytes as rank 0 of
eight, or step times with and without offload, in turns, one rank on NCCL.

    residual_speed.py peaks NUM_LAYERS ROWS WIDTH
    residual_speed.py speed NUM_LAYERS ROWS WIDTH ROUNDS

One process for all systems, so that host memory is page-locked once.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from residual_full_scale import NUM_TOKENS, Trained, build, measure
from stage import start, start_real_ranks
from timing import in_turns, ratio

from lowtide import memory_report

WORLD, PREFETCH = 8, 1
SYSTEMS = ("nothing named", "offload residual", "offload both")
# What computes the same again: where `hidden` comes from the host, `up` does not run
# twice.
BASES = {"offload residual": "nothing named", "offload both": "save hidden"}
TIMED = (*SYSTEMS, "save hidden")


def peaks(num_layers: int, rows: int, width: int) -> dict[str, Any]:
    start(WORLD)
    found = {}
    for system in SYSTEMS:
        shape = (system, num_layers, rows, PREFETCH)
        found[system] = measure(WORLD, width, *shape)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return found


def step_of(model: Trained, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(tokens).backward()

    return step


def speed(num_layers: int, rows: int, width: int, rounds: int) -> dict[str, Any]:
    start_real_ranks()
    tokens = torch.randint(NUM_TOKENS, (rows,), device="cuda")
    models = {}
    for system in TIMED:
        model = build(system, num_layers, width, PREFETCH, sharded=True)
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().normal_(std=width**-0.5)
        models[system] = model
    steps = {system: step_of(model, tokens) for system, model in models.items()}
    times = in_turns(steps, rounds=rounds, warm_up=1)
    for model in models.values():
        refuse_pageable(model)
    dist.destroy_process_group()
    return {
        "ms": times,
        "ratio": {
            system: {"base": base, **ratio(times[system], times[base])}
            for system, base in BASES.items()
        },
    }


def refuse_pageable(model: Trained) -> None:
    report = memory_report(model).activations
    if report is not None and report.pageable_peak > 0:
        raise RuntimeError(
            "residual_speed.py: expected page-locked memory for all that is offloaded, "
            f"got {report.pageable_peak} bytes that are pageable. Free host memory, or "
            "raise what may be locked (ulimit -l)."
        )


def main() -> None:
    what, *numbers = sys.argv[1:]
    print(json.dumps({"peaks": peaks, "speed": speed}[what](*map(int, numbers))))


if __name__ == "__main__":
    main()
