"""Captures a sharded training step in a CUDA graph, over the dry driver, which refuses
what CUDA refuses.

    python capture_dry_run.py KIND ...    prints {kind: result}, up to the first that is
                                          refused

A result is {"graphs": captured, "stray": work that ran outside them}, or
{"refused": why}.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from support.cuda_steps import KINDS, start

# Steps on the legacy stream, which no capture may join, and on another one.
ON_DEFAULT, WARM_UP = 3, 3


def stray() -> int:
    count = ctypes.CDLL(None).lowtide_dry_stray
    count.restype = ctypes.c_int64
    return count()


def capture(step: Callable[[], None]) -> int:
    """How many graphs it made: on the stream of the warm-up, and on torch's own."""
    for _ in range(ON_DEFAULT):
        step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for stream in (side, None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        graphs.append(graph)
        graph.replay()
        step()  # and eagerly in between
    return len(graphs)


def main() -> None:
    start()
    found: dict[str, dict[str, int | str]] = {}
    for kind in sys.argv[1:]:
        step, before = KINDS[kind](capturable=True), stray()
        try:
            found[kind] = {"graphs": capture(step), "stray": stray() - before}
        except RuntimeError as error:
            # Ending a capture that failed fails too, and so does whatever follows.
            cause = error.__context__ or error
            found[kind] = {"refused": str(cause).splitlines()[0]}
            print(json.dumps(found), flush=True)
            os._exit(0)
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
