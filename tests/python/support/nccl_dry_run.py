"""What lowtide asks of NCCL in a training step, by torch's own process group.

    python nccl_dry_run.py calls       prints {setting: calls}, a call as
                                       [what, bytes, reduction, communicator, depth]
    python nccl_dry_run.py recorded    prints how many blocks became free late, because
                                       another stream was recorded on them; one is the
                                       program's own

Over the stub. Depth: of ncclGroupStart. The second needs events that complete when the
host waits.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from lowtide.phantom.histories import trace_of_cuda
from support.cuda_steps import WORLD, sharded, units_of


def all_calls() -> list[list[str]]:
    """Since the process began."""
    function = ctypes.CDLL(None).cuda_stub_nccl_calls
    function.restype = ctypes.c_char_p
    lines = function().decode().splitlines()
    calls = []
    for line in lines:
        what, size, *rest = line.split()
        reduction = rest[0] if what in REDUCING else "-"
        calls.append([what, size, reduction, rest[-3], rest[-1]])
    return calls


REDUCING = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


def calls_of(step: Callable[[], None], *, from_start: bool = False) -> list[list[str]]:
    """Of the third step, or of all three."""
    before = len(all_calls())
    for _ in range(2):
        step()
    if not from_start:
        before = len(all_calls())
    step()
    return all_calls()[before:]


def start() -> None:
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=WORLD,
        device_id=torch.device("cuda", 0),
    )


def registered() -> list[list[str]]:
    step = sharded(prepare=take_buffers_from_the_group)
    return calls_of(step, from_start=True)


def take_buffers_from_the_group(model: torch.nn.Module) -> None:
    for unit in units_of(model):
        unit.set_allocate_memory_from_process_group_for_comm(True)


def recorded() -> int:
    block, stream = torch.empty(1 << 20, device="cuda"), torch.cuda.Stream()
    block.record_stream(stream)
    del block
    torch.empty(1 << 21, device="cuda")
    trace = trace_of_cuda(torch.cuda.memory._snapshot())
    return sum(operation.op == "record" for operation in trace.operations)


def settings() -> dict[str, list[list[str]]]:
    found = {"separate": calls_of(sharded()), "registered": registered()}
    dist.destroy_process_group()
    os.environ["LOWTIDE_COMMUNICATORS"] = "shared"
    start()
    found["shared"] = calls_of(sharded())
    dist.destroy_process_group()
    return found


def main() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    torch.backends.cuda.enable_cudnn_sdp(False)
    start()
    if sys.argv[1] == "calls":
        print(json.dumps(settings()))
        return
    calls_of(sharded())
    print(recorded(), flush=True)
    os._exit(0)  # the group's watchdog would wait for events


if __name__ == "__main__":
    main()
