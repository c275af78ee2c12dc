"""Captures a sharded training step in a CUDA graph, over the stub, which refuses what
CUDA refuses.

    python capture_dry_run.py KIND    prints {"graphs": captured, "stray": work that ran
                                      outside them}, or {"refused": why}
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from support.steady_step_dry_run import KINDS, step_of

WARM_UP, NUM_GRAPHS, WORLD = 3, 2, 8


def stray() -> int:
    count = ctypes.CDLL(None).cuda_stub_stray
    count.restype = ctypes.c_int64
    return count()


def capture(step: Callable[[], None]) -> int:
    """How many graphs it made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for _ in range(NUM_GRAPHS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
        graphs.append(graph)
        graph.replay()
        step()  # and eagerly in between
    return len(graphs)


def main() -> None:
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=WORLD,
        device_id=torch.device("cuda", 0),
    )
    torch.backends.cuda.enable_cudnn_sdp(False)
    step = step_of(**KINDS[sys.argv[1]], capturable=True)
    before = stray()
    try:
        graphs = capture(step)
    except RuntimeError as error:
        # Ending a capture that failed fails too.
        cause = error.__context__ or error
        print(json.dumps({"refused": str(cause).splitlines()[0]}), flush=True)
        os._exit(0)
    print(json.dumps({"graphs": graphs, "stray": stray() - before}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
