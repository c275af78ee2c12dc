"""CPU time of the host in forward and backward of Llama 8B's shapes, the systems in
turns, as JSON: over the dry driver, as one of 8 ranks on torch's own ProcessGroupNCCL.

    nccl_host_time.py NUM_LAYERS NUM_STEPS [spin]

Of the two threads that issue, the program's and autograd's, in microseconds a step, of
which a quarter took no longer; beside it the wall's time, and how many collectives a
step has. ``spin``: another thread of Python's runs all the while.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from llama_memory import CONFIGS, Llama
from stage import without_cudnn_attention

from lowtide.phantom.dry import driver, groups, lone_rank
from support.systems import get_system

WORLD = 8
SYSTEMS = ("plain", "fsdp2", "lowtide")
WARM_UP = 4
TOKENS = 256


def start() -> None:
    torch.set_num_threads(1)
    lone_rank.replace_gloo()
    groups.install()
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=WORLD,
        device_id=torch.device("cuda", 0),
    )
    without_cudnn_attention()


def make(name: str, num_layers: int) -> Any:
    with torch.device("meta"):
        model = Llama(replace(CONFIGS["8b"], num_layers=num_layers))
    if name == "plain":
        return model.bfloat16().to_empty(device="cuda")
    system = get_system(name)
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.layers, model):
        system.fully_shard(module, mp_policy=policy)
    return model.to_empty(device="cuda")


class Clock:
    """Of the two threads, in ns."""

    def __init__(self) -> None:
        self._clocks: list[int] = []

    def find(self, loss: torch.Tensor) -> None:
        """In the hook of a backward: on autograd's thread."""
        autograds: list[int] = []
        loss.register_hook(lambda _: autograds.append(threading.get_ident()))
        loss.backward()
        threads = {*autograds, threading.get_ident()}
        assert len(threads) == 2
        self._clocks = [time.pthread_getcpuclockid(thread) for thread in threads]

    def now(self) -> int:
        return sum(time.clock_gettime_ns(clock) for clock in self._clocks)


def collectives(calls: list[driver.Call]) -> int:
    """A group of calls is one."""
    groups = {call.group for call in calls if call.depth}
    return len(groups) + sum(not call.depth for call in calls)


def first_quarter(values: list[int]) -> float:
    """Others use the machine, too, which only makes a step longer."""
    return statistics.quantiles(values, n=4)[0] / 1e3


def spin(until: threading.Event) -> None:
    count = 0
    while not until.is_set():
        count += 1


def main() -> None:
    num_layers, num_steps = map(int, sys.argv[1:3])
    start()
    models = {name: make(name, num_layers) for name in SYSTEMS}
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
    clock = Clock()
    cpu: dict[str, list[int]] = {name: [] for name in SYSTEMS}
    wall: dict[str, list[int]] = {name: [] for name in SYSTEMS}
    calls: dict[str, int] = {}
    clock.find(models["plain"](tokens).float().sum())
    done = threading.Event()
    if "spin" in sys.argv:
        threading.Thread(target=spin, args=(done,), daemon=True).start()
    gc.disable()
    for step in range(WARM_UP + num_steps):
        for name, model in models.items():
            issued = driver.num_calls()
            before, began = clock.now(), time.perf_counter_ns()
            model(tokens).float().sum().backward()
            took, passed = clock.now() - before, time.perf_counter_ns() - began
            if step == WARM_UP:
                calls[name] = collectives(driver.calls()[issued:])
            model.zero_grad()
            if step >= WARM_UP:
                cpu[name].append(took)
                wall[name].append(passed)
        gc.collect()
    done.set()
    found = {
        name: {
            "cpu": first_quarter(cpu[name]),
            "wall": first_quarter(wall[name]),
            "collectives": calls[name],
        }
        for name in SYSTEMS
    }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
