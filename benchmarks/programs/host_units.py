"""Host time of forward and backward on a GPU whose work is negligible, the systems in
turns, as JSON: microseconds per unit, on torch's fake group of 8 ranks.

    host_units.py NUM_LAYERS NUM_STEPS

Wall-clock time of issuing: backward runs on a thread of its own there. Beside it the
time of the collectives of such a step alone: the fake group copies each tensor of a
gather once a rank, a launch each, which a real group does not.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from group_calls import GroupCalls
from host_models import SYSTEMS, Training, start
from stage import without_cudnn_attention

WARM_UP = 6


def issue(action: Callable[[], None]) -> int:
    """ns until the host is back, the device being idle before."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - begin


def group_calls(training: Training) -> GroupCalls:
    with GroupCalls() as calls:
        training.forward()
        training.backward()
    training.finish()
    return calls


def main() -> None:
    num_layers, num_steps = map(int, sys.argv[1:3])
    start()
    without_cudnn_attention()
    trainings = {name: Training(name, num_layers, "cuda") for name in SYSTEMS}
    times: dict[str, dict[str, list[int]]] = {
        name: {"forward": [], "backward": [], "group": []} for name in SYSTEMS
    }
    calls = {name: GroupCalls() for name in SYSTEMS}
    gc.disable()
    for step in range(WARM_UP + num_steps):
        for name, training in trainings.items():
            if step == WARM_UP - 1:
                calls[name] = group_calls(training)
                continue
            forward, backward = issue(training.forward), issue(training.backward)
            training.finish()
            if step >= WARM_UP:
                times[name]["forward"].append(forward)
                times[name]["backward"].append(backward)
                times[name]["group"].append(issue(calls[name].again))
        gc.collect()
    units = num_layers + 1

    def per_unit(values: list[int]) -> float:
        return statistics.median(values) / 1e3 / units

    figures: dict[str, Any] = {}
    for name, by_phase in times.items():
        phases = ("forward", "backward")
        figures[name] = {
            "phases": {phase: per_unit(by_phase[phase]) for phase in phases},
            "group": per_unit(by_phase["group"]),
            "calls": {k: n / units for k, n in calls[name].counts().items()},
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
