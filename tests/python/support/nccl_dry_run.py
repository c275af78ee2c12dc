"""What lowtide asks of NCCL in a training step, by torch's own process group.

    python nccl_dry_run.py calls       prints {setting: calls}, a call as in Call
    python nccl_dry_run.py unseen      prints {setting: counts}: of collectives that the
                                       current stream does not come after, as each
                                       unit's parameters are shown
    python nccl_dry_run.py symmetric   prints {setting: the calls of three steps, apart}
    python nccl_dry_run.py deleted     prints {where: [before, after]}: how many there
                                       are when a step has raised in forward, in
                                       backward or in a comm object, and when its model
                                       has been deleted
    python nccl_dry_run.py unbound BACKEND  prints {mesh: {"sharded", "first", "second":
                                       calls}}: of a group that is not bound to its
                                       device, until the model is sharded and in two
                                       steps
    python nccl_dry_run.py recorded    prints how many blocks became free late, because
                                       another stream was recorded on them; one is the
                                       program's own

Over the dry driver. The last needs events that complete when the host waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import driver
from lowtide.phantom.dry.driver import Call
from support.cuda_steps import sharded, start, units_of

MOST_CTAS = 7  # of the default group's communicator
# Torch's groups on NCCL: the older ones and nccl-lazy make a communicator where it is
# first used.
BACKENDS = ("nccl", "nccl-legacy", "nccl-lazy") if VERSION >= (2, 15) else ("nccl",)


def all_calls() -> list[Call]:
    """Since the process began."""
    return driver.calls()


def unseen() -> int:
    function = ctypes.CDLL(None).lowtide_dry_unseen_collectives
    function.restype = ctypes.c_int64
    return function(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def calls_of(step: Callable[[], None], *, from_start: bool = False) -> list[Call]:
    """Of the third step, or of all three."""
    before = len(all_calls())
    for _ in range(2):
        step()
    if not from_start:
        before = len(all_calls())
    step()
    return all_calls()[before:]


def start_with_a_config() -> None:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MOST_CTAS
    start(options)


def registered() -> list[Call]:
    step = sharded(prepare=take_buffers_from_the_group)
    return calls_of(step, from_start=True)


def take_buffers_from_the_group(model: torch.nn.Module) -> None:
    for unit in units_of(model):
        unit.set_allocate_memory_from_process_group_for_comm(True)


def gather_in_symmetric_memory(model: torch.nn.Module) -> None:
    for unit in units_of(model):
        unit.set_symm_mem_for_comm()


def sum_in_symmetric_memory(model: torch.nn.Module) -> None:
    for unit in units_of(model):
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_symm_mem_for_comm()


def symmetric() -> dict[str, list[list[Call]]]:
    found: dict[str, list[list[Call]]] = {}
    for prepare in (gather_in_symmetric_memory, sum_in_symmetric_memory):
        step = sharded(prepare=prepare)
        steps = found.setdefault(prepare.__name__, [])
        for _ in range(3):
            before = len(all_calls())
            step()
            steps.append(all_calls()[before:])
    return found


def bring_own_collectives(model: torch.nn.Module) -> None:
    for unit in units_of(model):
        unit.set_custom_all_gather(DefaultAllGather())
        unit.set_custom_reduce_scatter(DefaultReduceScatter())


def unseen_by_setting() -> dict[str, list[int]]:
    settings = {
        "separate": lambda model: None,
        "registered": take_buffers_from_the_group,
        "own": bring_own_collectives,
        "symmetric": sum_in_symmetric_memory,
    }
    return {name: unseen_with(prepare) for name, prepare in settings.items()}


def unseen_with(prepare: Callable[[torch.nn.Module], None]) -> list[int]:
    models: list[Any] = []

    def keep(model: torch.nn.Module) -> None:
        prepare(model)
        models.append(model)

    sharded(prepare=keep)()
    counts = []
    for unit in units_of(*models):
        unit.unshard()
        counts.append(unseen())
        unit.reshard()
    return counts


def unseen_by_failure() -> dict[str, list[int]]:
    settings = {
        "forward": lambda model: hook_into(model, fail),
        "backward": lambda model: hook_into(model, fail_in_backward),
        "comm object": bring_failing_collectives,
    }
    return {name: unseen_after(prepare) for name, prepare in settings.items()}


def unseen_after(prepare: Callable[[torch.nn.Module], None]) -> list[int]:
    models: list[weakref.ref[torch.nn.Module]] = []

    def remember(model: torch.nn.Module) -> None:
        prepare(model)
        models.append(weakref.ref(model))

    steps = [sharded(prepare=remember)]
    with contextlib.suppress(ZeroDivisionError):
        steps[0]()
    counts = [unseen()]
    steps.clear()
    for _ in range(1000):  # autograd's thread may hold the graph a little longer
        gc.collect()
        if models[0]() is None:
            break
    return [*counts, unseen()]


def hook_into(model: Any, failure: Callable[..., None]) -> None:
    model.layers[0].register_forward_hook(failure)


def fail(*_: Any) -> None:
    raise ZeroDivisionError


class FailingAllGather(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        super().__call__(*args, **kwargs)
        fail()


def bring_failing_collectives(model: torch.nn.Module) -> None:
    for unit in units_of(model):
        unit.set_custom_all_gather(FailingAllGather())


def fail_in_backward(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(fail)


def recorded() -> int:
    block, stream = torch.empty(1 << 20, device="cuda"), torch.cuda.Stream()
    block.record_stream(stream)
    del block
    torch.empty(1 << 21, device="cuda")
    return late_frees(torch.cuda.memory._snapshot()["device_traces"][0])


def late_frees(entries: Sequence[dict[str, Any]]) -> int:
    """A block that was used on its own stream only is free as it is given back."""
    return sum(
        entry["action"] == "free_requested"
        and (after["action"], after["addr"]) != ("free_completed", entry["addr"])
        for entry, after in itertools.pairwise(entries)
    )


def settings() -> dict[str, list[Call]]:
    found = {"separate": calls_of(sharded()), "from the start": all_calls()}
    found["registered"] = registered()
    found["replicated"] = calls_of(sharded(replicas=2))
    dist.destroy_process_group()
    os.environ["LOWTIDE_COMMUNICATORS"] = "shared"
    start_with_a_config()
    found["shared"] = calls_of(sharded())
    dist.destroy_process_group()
    return found


def unbound(backend: str) -> dict[str, dict[str, list[Call]]]:
    meshes: dict[str, dict[str, Any]] = {
        "shards": {},
        "replicas": {"replicas": 2},
        "parts": {"reshard_after_forward": 2},
    }
    found = {}
    for name, how in meshes.items():
        places = [driver.num_calls()]

        def note(_: Any = None, places: list[int] = places) -> None:
            places.append(driver.num_calls())

        start(bound=False, backend=backend)
        step = sharded(prepare=note, **how)
        for _ in range(2):
            step()
            note()
        parts = (all_calls()[begin:end] for begin, end in itertools.pairwise(places))
        found[name] = dict(zip(("sharded", "first", "second"), parts, strict=True))
        dist.destroy_process_group()
    return found


def main() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if sys.argv[1] == "unbound":
        print(json.dumps(unbound(sys.argv[2])))
        return
    start_with_a_config()
    if sys.argv[1] == "calls":
        print(json.dumps(settings()))
        return
    found: dict[str, Callable[[], Any]] = {
        "unseen": unseen_by_setting,
        "deleted": unseen_by_failure,
        "symmetric": symmetric,
    }
    if sys.argv[1] in found:
        print(json.dumps(found[sys.argv[1]]()))
        dist.destroy_process_group()
        return
    calls_of(sharded())
    print(recorded(), flush=True)
    os._exit(0)  # the group's watchdog would wait for events


if __name__ == "__main__":
    main()
