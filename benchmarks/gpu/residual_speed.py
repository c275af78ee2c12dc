"""Step time of the residual's stack on a GPU with and without offload, in turns, as
JSON.

    residual_speed.py NUM_LAYERS ROWS WIDTH ROUNDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from residual_full_scale import NUM_TOKENS, Trained, build
from stage import start
from timing import in_turns, ratio

WORLD, PREFETCH = 8, 1
BASE = "nothing named"
SYSTEMS = (BASE, "offload residual", "offload both")


def step_of(model: Trained, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(tokens).backward()

    return step


def main() -> None:
    num_layers, rows, width, rounds = map(int, sys.argv[1:5])
    start("cuda", WORLD)
    tokens = torch.randint(NUM_TOKENS, (rows,), device="cuda")
    steps = {}
    for system in SYSTEMS:
        model = build("cuda", system, num_layers, width, PREFETCH, WORLD)
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().normal_(std=width**-0.5)
        steps[system] = step_of(model, tokens)
    times = in_turns(steps, rounds=rounds, warm_up=1)
    ratios = {system: ratio(times[system], times[BASE]) for system in SYSTEMS[1:]}
    print(json.dumps({"ms": times, "ratio": ratios}))


if __name__ == "__main__":
    main()
