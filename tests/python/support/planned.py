"""What the planning tests run in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lowtide.planning import Plan, plan_request
from lowtide.planning.request import ModelFile, Request, Script

ROOT = Path(__file__).parents[3]
LLAMA = str(ROOT / "examples/llama.py")
SCRIPTS = ROOT / "tests/python/phantom/scripts"
# So that figures are of the program's own tensors.
NO_WORKSPACE = {"cublas_workspace": 0}


def plan_llama(**settings: Any) -> Plan:
    return plan_request(llama_request(**settings))


def llama_request(**settings: Any) -> Request:
    request = {
        name: settings.pop(name)
        for name in ("world", "rank", "steps", "device_memory", "snapshot")
        if name in settings
    }
    allocator = NO_WORKSPACE | settings.pop("allocator", {})
    path = settings.pop("path", LLAMA)
    program = ModelFile(path, **{"config": "bytes", "sequence": 256} | settings)
    return Request(program, allocator=allocator, **request)


def plan_script(name: str, *arguments: str, **settings: Any) -> Plan:
    return plan_request(Request(Script(str(SCRIPTS / name), arguments), **settings))


# Its operator's memory is not reviewed.
TOPK = """
import torch
w = torch.nn.Linear(512, 512, device="cuda")
opt = torch.optim.SGD(w.parameters(), lr=1)
while True:
    w(torch.ones(64, 512, device="cuda")).topk(2)[0].sum().backward()
    opt.step()
"""


# -- programs for lowtide.plan ------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 1024, bias=False)
        self.second = nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Squares(nn.Module):
    """Weights as large as the values between them, for 256 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in "123"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


State = tuple[nn.Module, torch.optim.Optimizer]


def build() -> State:
    model = Net().to("cuda")
    return model, torch.optim.Adam(model.parameters())


def build_fused() -> State:
    model = Net().to("cuda")
    return model, torch.optim.Adam(model.parameters(), fused=True)


def build_sharded() -> State:
    with torch.device("cuda"):
        model = Net()
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters())


def build_squares() -> State:
    model = Squares().to("cuda")
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters())


def step_squares(state: State) -> None:
    model, optimizer = state
    model(torch.randn(256, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def step(state: State) -> None:
    model, optimizer = state
    x = torch.randn(256, 512, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def step_without_optimizer(state: State) -> None:
    state[0](torch.randn(2, 512, device="cuda")).sum().backward()


def step_that_fails(state: State) -> None:
    state[0](torch.randn(2, 3, device="cuda"))


def never_returns(state: State) -> None:
    import os

    os._exit(7)


# -- a run nobody listens to --------------------------------------------------------


def peaks_of(train: Callable[[Any], Any], *arguments: Any) -> tuple[int, int, int]:
    """Allocated, reserved, and number of allocations, on an installed phantom."""
    train(*arguments)
    stats = torch.accelerator.memory_stats()
    return (
        stats["allocated_bytes.all.peak"],
        stats["reserved_bytes.all.peak"],
        stats["allocation.all.allocated"],
    )
