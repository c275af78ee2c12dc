"""Prints which ranks of the world each communicator of a program is of, as JSON.

communicators_dry_run.py nccl           of 8 x 4 ranks: both dimensions, a pair, all
communicators_dry_run.py nccl --sends   and sends from the first to the last rank
communicators_dry_run.py nccl --bound   of a group that knows its device at once

The first is the name of torch's process group.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lowtide.phantom.dry import driver


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    bound = "--bound" in sys.argv
    dist.init_process_group(sys.argv[1], device_id=device if bound else None)
    mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("replicate", "shard"))
    tensor = torch.ones(4, device="cuda")
    for group in (mesh["replicate"].get_group(), mesh["shard"].get_group(), None):
        dist.all_reduce(tensor, group=group)
    if "--sends" in sys.argv:
        dist.send(tensor, 31)
    pair = dist.new_group([0, dist.get_rank() or 1])
    dist.all_reduce(tensor, group=pair)
    found = {"communicators": driver.communicators(), "calls": driver.calls()}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
