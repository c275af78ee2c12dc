"""Bandwidth of the link between host and GPU with page-locked memory, as JSON: to the
device, to the host, and both at once.

    links.py BYTES ROUNDS
"""

from __future__ import annotations

import json
import sys
from statistics import median

import torch
from timing import in_turns


def main() -> None:
    num_bytes, rounds = map(int, sys.argv[1:3])
    hosts = [torch.empty(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    current = torch.cuda.current_stream()

    def to_device() -> None:
        devices[0].copy_(hosts[0], non_blocking=True)

    def to_host() -> None:
        hosts[1].copy_(devices[1], non_blocking=True)

    def both() -> None:
        for stream, copy in zip(streams, (to_device, to_host), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            current.wait_stream(stream)

    actions = {"h2d": to_device, "d2h": to_host, "both": both}
    times = in_turns(actions, rounds=rounds, warm_up=2)
    moved = {"h2d": num_bytes, "d2h": num_bytes, "both": 2 * num_bytes}
    # bytes per millisecond are kilobytes per second
    print(
        json.dumps({name: moved[name] / median(ms) / 1e6 for name, ms in times.items()})
    )


if __name__ == "__main__":
    main()
