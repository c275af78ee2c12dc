"""Captures a sharded training step in a CUDA graph, over the stub, which refuses what
CUDA refuses.

    python capture_dry_run.py KIND    prints {"graphs": captured, "stray": work that ran
                                      outside them}
"""

from __future__ import annotations

import ctypes
import json
import sys

import torch
import torch.distributed as dist

from support.steady_step_dry_run import KINDS, step_of

WARM_UP, NUM_GRAPHS = 3, 2


def stray() -> int:
    count = ctypes.CDLL(None).cuda_stub_stray
    count.restype = ctypes.c_int64
    return count()


def main() -> None:
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    torch.backends.cuda.enable_cudnn_sdp(False)
    step = step_of(**KINDS[sys.argv[1]], capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    before = stray()
    graphs = []
    for _ in range(NUM_GRAPHS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
        graphs.append(graph)
        graph.replay()
        step()  # and eagerly in between
    print(json.dumps({"graphs": len(graphs), "stray": stray() - before}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
