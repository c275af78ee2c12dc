"""The cases of operator_cases, forward and backward, run for their allocations only:
on ``cuda`` over the dry driver, or on ``phantom`` in meta mode.

    python operator_dry_run.py    on cuda, prints {case: [forward, backward]}
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from support.operator_cases import CASES, Make

# Bytes of every allocation, and their negative when it is given back, in order; frees
# of what was allocated before do not count.
Events = list[int]
# What torch's history has: kind, address, bytes.
History = list[tuple[str, int, int]]

# Runs an action; returns the history meanwhile, and its result.
Record = Callable[[Callable[[], Any]], tuple[History, Any]]


def dry_run(device: str, record: Record) -> dict[str, tuple[Events, Events]]:
    make = Make(torch.device(device))
    use_every_workspace(make)
    found = {}
    for name, one in CASES.items():
        inputs = list(one.inputs(make))
        forward, output = record(lambda one=one, i=inputs: one.function(*i))
        backward: History = []
        if isinstance(output, torch.Tensor) and output.requires_grad:
            gradient = torch.empty_like(output)
            leaves = [
                t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            backward, _ = record(
                lambda o=output, t=leaves, g=gradient: torch.autograd.grad(o, t, g)
            )
        found[name] = (events_of(forward), events_of(backward))
    return found


def use_every_workspace(make: Make) -> None:
    """Those of cuBLAS stay; in which case they are made does not matter."""
    x, bias = make.floats(8, 8), make.floats(8)
    ((x @ x).sum() + torch.addmm(bias, x, x).sum()).backward()
    torch.autograd.grad(torch.addmm(bias, x, x), (bias, x), make.constant(8, 8))


def events_of(history: History) -> Events:
    live: set[int] = set()
    events = []
    for kind, address, size in history:
        if kind == "alloc":
            live.add(address)
            events.append(size)
        elif kind == "free_requested" and address in live:
            live.remove(address)
            events.append(-size)
    return events


def record_on_cuda(action: Callable[[], Any]) -> tuple[History, Any]:
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=10**5, context=None)
    result = action()
    trace = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    return [(e["action"], e["addr"], e["size"]) for e in trace], result


def record_on_phantom(
    action: Callable[[], Any],
) -> tuple[History, Any]:
    from lowtide import _phantom

    memory = _phantom.device_memory()
    memory.record_history(10**5)
    result = action()
    history = memory.history()
    memory.record_history(0)
    return [entry[:3] for entry in history], result


def main() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    print(json.dumps(dry_run("cuda", record_on_cuda)))


if __name__ == "__main__":
    main()
