"""Thread CPU time of forward and backward over 32 small operators that save 48 tensors:
plain, in a lowtide region, and under torch's checkpoint, in turns.  As JSON, in us.

    region_cost.py REPETITIONS
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide

WARM_UP = 50


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(16):
            x = torch.sin(x * self.scale)
        return x


def main() -> None:
    torch.set_num_threads(1)
    repetitions = int(sys.argv[1])
    plain, ours, theirs = Small(), lowtide.checkpoint(Small()), Small()
    x = torch.ones(4, requires_grad=True)
    systems = {
        "plain": lambda: plain(x),
        "lowtide": lambda: ours(x),
        "torch": lambda: checkpoint(theirs, x, use_reentrant=False),
    }
    times: dict[str, list[int]] = {name: [] for name in systems}
    gc.disable()
    for repetition in range(WARM_UP + repetitions):
        for name, forward in systems.items():
            start = time.thread_time_ns()
            forward().sum().backward()
            end = time.thread_time_ns()
            if repetition >= WARM_UP:
                times[name].append(end - start)
        if repetition % 50 == 0:
            gc.collect()
    tag_start = time.perf_counter_ns()
    with torch.inference_mode():
        for _ in range(10_000):
            lowtide.tag(x, "x")
    tag = (time.perf_counter_ns() - tag_start) / 10_000
    # Not the median: others on the machine double half of the times.
    least = {n: statistics.quantiles(each, n=10)[0] / 1e3 for n, each in times.items()}
    print(json.dumps(least | {"tag_ns": tag}))


if __name__ == "__main__":
    main()
