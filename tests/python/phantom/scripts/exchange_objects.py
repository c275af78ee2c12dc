"""Ranks exchange objects and CPU tensors and print what they have.

exchange_objects.py         to the end
exchange_objects.py early   rank 1 ends before the last exchange
"""

import json
import sys

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl")
rank, world = dist.get_rank(), dist.get_world_size()
found = {}
objects = [None] * world
dist.all_gather_object(objects, f"of {rank}")
found["all_gather"] = list(objects)
objects = [None] * world if rank == 0 else None
dist.gather_object(f"of {rank}", objects, dst=0)
found["gather"] = objects
objects = [f"of {rank}"] if rank == 1 else [None]
dist.broadcast_object_list(objects, src=1)
found["broadcast"] = objects
scattered = [None]
dist.scatter_object_list(scattered, [f"for {each}" for each in range(world)], src=0)
found["scatter"] = scattered
total = torch.tensor(rank + 1)
dist.all_reduce(total)
found["gloo"] = total.item()
dist.monitored_barrier(dist.new_group(backend="gloo"))
if rank == 0:
    print(json.dumps(found))
if rank != 1 or sys.argv[1:] != ["early"]:
    dist.all_gather_object([None] * world, rank)
