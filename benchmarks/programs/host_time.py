"""Thread CPU time of forward and backward, the systems in turns, as JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

import torch.distributed as dist
from host_models import SYSTEMS, Training, start

NUM_LAYERS = 32
WARM_UP = 6


def main() -> None:
    num_steps = int(sys.argv[1])
    start()
    trainings = {name: Training(name, NUM_LAYERS) for name in SYSTEMS}
    times: dict[str, dict[str, list[int]]] = {
        name: {"forward": [], "backward": []} for name in SYSTEMS
    }
    gc.disable()
    for step in range(WARM_UP + num_steps):
        for name, training in trainings.items():
            # Backward on a CPU runs on the thread that calls it.
            at_start = time.thread_time_ns()
            training.forward()
            after_forward = time.thread_time_ns()
            training.backward()
            after_backward = time.thread_time_ns()
            training.finish()
            if step >= WARM_UP:
                times[name]["forward"].append(after_forward - at_start)
                times[name]["backward"].append(after_backward - after_forward)
        gc.collect()
    print(
        json.dumps(
            {
                name: {
                    phase: statistics.median(values) / 1e3 / (NUM_LAYERS + 1)
                    for phase, values in phases.items()
                }
                for name, phases in times.items()
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
