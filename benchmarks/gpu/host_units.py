"""Host time of forward and backward on a GPU whose work is negligible, the systems in
turns, as JSON: microseconds per unit, on torch's fake group of 8 ranks.

    host_units.py NUM_LAYERS NUM_STEPS

Wall-clock time of issuing: backward runs on a thread of its own there.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from host_models import SYSTEMS, Training, start
from stage import without_cudnn_attention

WARM_UP = 6


def issue(action: Callable[[], None]) -> int:
    """ns until the host is back, the device being idle before."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - begin


def main() -> None:
    num_layers, num_steps = map(int, sys.argv[1:3])
    start()
    without_cudnn_attention()
    trainings = {name: Training(name, num_layers, "cuda") for name in SYSTEMS}
    times: dict[str, dict[str, list[int]]] = {
        name: {"forward": [], "backward": []} for name in SYSTEMS
    }
    gc.disable()
    for step in range(WARM_UP + num_steps):
        for name, training in trainings.items():
            forward, backward = issue(training.forward), issue(training.backward)
            training.finish()
            if step >= WARM_UP:
                times[name]["forward"].append(forward)
                times[name]["backward"].append(backward)
        gc.collect()
    figures = {
        name: {
            phase: statistics.median(values) / 1e3 / (num_layers + 1)
            for phase, values in phases.items()
        }
        for name, phases in times.items()
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
