"""Trains as one of two ranks on NCCL, over the dry driver, until a collective does not
finish there (LOWTIDE_DRY_HANG) and torch ends the process.

python hang_dry_run.py RANK PORT SECONDS        PORT: of the ranks' TCPStore; SECONDS:
                                                the group's timeout
python hang_dry_run.py RANK PORT SECONDS raise  raises before its second step
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from support.cuda_steps import sharded


def main(rank: int, port: int, seconds: float, *raises: str) -> None:
    dist.init_process_group(
        "nccl",
        store=dist.TCPStore("localhost", port),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device("cuda", 0),
    )
    torch.backends.cuda.enable_cudnn_sdp(False)
    step = sharded(read=True)
    step()
    if raises:
        raise ValueError("token 7 of 5\nand a second line")
    print("stepped", flush=True)
    for _ in range(100):
        step()


if __name__ == "__main__":
    rank, port, seconds, *rest = sys.argv[1:]
    main(int(rank), int(port), float(seconds), *rest)
