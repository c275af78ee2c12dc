"""What a world leaves behind in a process that goes on: process groups are made, a
model is sharded over them and trained, and they are destroyed, again and again.

The controls are torch's FSDP2 in the same loop, and collectives in as many groups as
lowtide makes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from footprint import sample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

RANKS = 2
SYSTEMS = ("lowtide", "FSDP2", "collectives alone")
GROUPS = 3  # of a mesh's shards: gathers, reductions, and what hosts compare
WIDTH, STEPS = 64, 2


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2, over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_in_use() -> int:
    """Bytes that are allocated: unlike resident memory without what fragments keep."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Heap
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def train(mesh: Any, fully_shard: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    for _ in range(STEPS):
        model(torch.ones(2, WIDTH)).sum().backward()
        with torch.no_grad():  # of the rows here: torch keeps operators on DTensors
            for p in model.parameters():
                p.to_local().sub_(p.grad.to_local(), alpha=1e-3)
        model.zero_grad()


def communicate(mesh: Any) -> None:
    groups = [mesh.get_group()]
    groups += [dist.new_group([*range(RANKS)]) for _ in range(GROUPS - 1)]
    for group in groups * STEPS:
        rows = torch.ones(WIDTH * WIDTH)
        dist.all_gather_into_tensor(rows.new_empty(RANKS * len(rows)), rows, group)
        dist.reduce_scatter_tensor(
            rows.new_empty(len(rows) // RANKS), rows, group=group
        )
        dist.all_reduce(rows, group=group)


def worlds(system: str, count: int) -> list[dict[str, int]]:
    """On each of RANKS processes without a process group: what is held after each
    world."""
    import lowtide

    torch.set_num_threads(1)
    shards = {"lowtide": lowtide.fully_shard, "FSDP2": dist.fsdp.fully_shard}
    rank = int(os.environ["RANK"])
    where = dist.FileStore(os.environ["RANK_POOL_STORE"], RANKS)
    port = 0 if rank == 0 else int(where.get("port"))
    store = dist.TCPStore(
        "localhost", port, is_master=rank == 0, wait_for_workers=False
    )
    if rank == 0:
        where.set("port", str(store.port))
    samples = []
    for number in range(count):
        world = dist.PrefixStore(f"world {number}", store)
        dist.init_process_group("gloo", store=world, rank=rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", (RANKS,))
        if system in shards:
            train(mesh, shards[system])
        else:
            communicate(mesh)
        dist.barrier()
        # torch 2.10 and 2.11 never let go of the meshes that DTensor's operators met
        # (pytorch issue 181761), nor these of their groups, which have threads.
        mesh._pg_registry.clear()
        del mesh
        _clear_sharding_prop_cache()
        gc.collect()
        dist.destroy_process_group()
        time.sleep(0.02)  # gloo's threads let go of what they sent
        samples.append(sample() | {"heap": heap_in_use()})
    return samples
