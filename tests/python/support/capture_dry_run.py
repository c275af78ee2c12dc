"""Captures a sharded training step in a CUDA graph, over the dry driver, which refuses
what CUDA refuses.

    python capture_dry_run.py KIND ...    prints {kind: result}, up to the first that is
                                          refused
    python capture_dry_run.py gradients   prints [moved, taken] of graphs of forward and
                                          backward, whose optimizer steps eagerly: how
                                          many gradients are elsewhere after replays,
                                          and how many lie where others may

A result is {"graphs": captured, "stray": work that ran outside them, "taken": places of
captured parameters and gradients where eager steps may have put something else}, or
{"refused": why}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from support.cuda_steps import KINDS, sharded, start

# Steps on the legacy stream, which no capture may join, and on another one.
ON_DEFAULT, WARM_UP = 3, 3


def stray() -> int:
    count = ctypes.CDLL(None).lowtide_dry_stray
    count.restype = ctypes.c_int64
    return count()


def address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


@contextlib.contextmanager
def seen_addresses(*, in_modules: bool) -> Iterator[set[int]]:
    """Of parameters as optimizers see them, with their gradients, and full ones as
    modules inside of units do."""
    found: set[int] = set()

    def in_forward(module: nn.Module, _: Any) -> None:
        found.update(
            p.data_ptr()
            for p in module.parameters(recurse=False)
            if not isinstance(p, DTensor)
        )

    def at_a_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                found.add(address(p))
                if p.grad is not None:
                    found.add(address(p.grad))

    hooks = [register_optimizer_step_pre_hook(at_a_step)]
    if in_modules:
        hooks.append(register_module_forward_pre_hook(in_forward))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def taken(addresses: set[int]) -> int:
    """How many lie neither in a graph's own memory nor in a tensor that is there."""
    assert addresses
    kept = []
    for segment in torch.cuda.memory._snapshot()["segments"]:
        if tuple(segment["segment_pool_id"]) != (0, 0):
            kept.append((segment["address"], segment["total_size"]))
            continue
        kept += [
            (block["address"], block["size"])
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
    return sum(
        not any(begin <= one < begin + size for begin, size in kept)
        for one in addresses
    )


def capture(step: Callable[[], None], seen: set[int]) -> dict[str, int | str]:
    """On the stream of the warm-up, and on torch's own; ``seen``: of
    :func:`seen_addresses`."""
    for _ in range(ON_DEFAULT):
        step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graphs, addresses = [], set[int]()
    for stream in (side, None):
        graph = torch.cuda.CUDAGraph()
        seen.clear()
        with torch.cuda.graph(graph, stream=stream):
            step()
        graphs.append(graph)
        addresses |= seen
        graph.replay()
        step()  # and eagerly in between
    return {"graphs": len(graphs), "taken": taken(addresses)}


def captured_gradients() -> list[int]:
    models: list[Any] = []
    step = sharded(prepare=models.append, optimized=False)
    (model,) = models
    shards = list(model.parameters())
    optimizer = torch.optim.AdamW(shards, fused=True)
    for _ in range(WARM_UP):
        step()
        optimizer.step()
        optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = [address(p.grad) for p in shards if p.grad is not None]
    tokens = torch.zeros(1, 32, dtype=torch.long, device="cuda")
    for _ in range(2):
        graph.replay()
        optimizer.step()
        with torch.no_grad():
            model(tokens, tokens)  # an evaluation in between
    after = [address(p.grad) for p in shards if p.grad is not None]
    assert len(before) == len(shards)
    moved = sum(one != other for one, other in zip(before, after, strict=True))
    return [moved, taken({*before, *after})]


def main() -> None:
    start()
    if sys.argv[1:] == ["gradients"]:
        print(json.dumps(captured_gradients()))
        dist.destroy_process_group()
        return
    found: dict[str, dict[str, int | str]] = {}
    for kind in sys.argv[1:]:
        step, before = KINDS[kind](capturable=True), stray()
        try:
            # A hook on all modules would be a part of what is compiled.
            with seen_addresses(in_modules="compiled" not in kind) as seen:
                found[kind] = capture(step, seen) | {"stray": stray() - before}
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
