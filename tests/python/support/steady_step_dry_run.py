"""How often the host waits for the device in training steps on CUDA, dry.

python steady_step_dry_run.py           prints {kind of step: waits in each step}, on a
                                        fake group, whose ranks are not compared
python steady_step_dry_run.py nccl      the same on NCCL's
python steady_step_dry_run.py small     prints {number of small parameters in a unit:
                                        launches that sharding adds to a backward}, with
                                        sync and without
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide
from support.cuda_steps import KINDS, WORLD, Step, start

NUM_STEPS = 6


def host_waits() -> int:
    waits = ctypes.CDLL(None).lowtide_dry_host_waits
    waits.restype = ctypes.c_int64
    return waits()


def waits_of(step: Step) -> list[int]:
    found = []
    for _ in range(NUM_STEPS):
        before = host_waits()
        step()
        found.append(host_waits() - before)
    return found


def launches() -> int:
    count = ctypes.CDLL(None).lowtide_dry_launches
    count.restype = ctypes.c_int64
    return count()


def launches_of_backward(num_norms: int, *, sharded: bool, sync: bool) -> int:
    norms = (nn.LayerNorm(64) for _ in range(num_norms))
    model: Any = nn.Sequential(*norms).to("cuda", torch.bfloat16)
    if sharded:
        lowtide.fully_shard(
            model,
            mp_policy=lowtide.MixedPrecisionPolicy(reduce_dtype=torch.float32),
        )
        model.set_requires_gradient_sync(sync)
    found = 0
    for _ in range(3):
        loss = model(torch.zeros(2, 64, device="cuda", dtype=torch.bfloat16)).sum()
        before = launches()
        loss.backward()
        found = launches() - before
        if sync:
            model.zero_grad()
    return found


def added_launches(num_norms: int, *, sync: bool) -> int:
    sharded = launches_of_backward(num_norms, sharded=True, sync=sync)
    # Without sharding AccumulateGrad keeps the first gradients as they are.
    return sharded - launches_of_backward(num_norms, sharded=False, sync=True)


def main(what: str) -> None:
    if what == "nccl":
        start()
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        torch.backends.cuda.enable_cudnn_sdp(False)
    if what == "small":
        found: Any = {
            str(sync): {n: added_launches(n, sync=sync) for n in (2, 8)}
            for sync in (True, False)
        }
    else:
        found = {name: waits_of(make()) for name, make in KINDS.items()}
    print(json.dumps(found))
    torch.cuda.synchronize()  # NCCL's group ends when the events of its calls have come
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-1])
