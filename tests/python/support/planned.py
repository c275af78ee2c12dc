"""What the planning tests run in processes of their own. Each starts torch anew, so a
plan is made once for all tests that ask for the same."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.phantom.dry import launch
from lowtide.planning import Plan, plan_request
from lowtide.planning.request import ModelFile, Request, Script
from support.dry_process import run_dry

ROOT = Path(__file__).parents[3]
LLAMA = str(ROOT / "examples/llama.py")
SCRIPTS = ROOT / "tests/python/phantom/scripts"

State = tuple[nn.Module, torch.optim.Optimizer]


def plan_text(folder: Path, text: str, **settings: Any) -> Plan:
    """Of a script with that text, ``train.py`` in ``folder``."""
    script = folder / "train.py"
    script.write_text(text)
    return plan_request(Request(Script((str(script),)), **settings))


@functools.cache
def plan_script(name: str, *arguments: str, **settings: Any) -> Plan:
    return plan_request(Request(Script((str(SCRIPTS / name), *arguments)), **settings))


@functools.cache
def plan_llama(**settings: Any) -> Plan:
    """Without workspaces of cuBLAS."""
    with no_workspaces():
        return plan_request(llama_request(**settings))


@functools.cache
def plan_net(build: Callable[[], State], **settings: Any) -> Plan:
    """Without workspaces of cuBLAS."""
    with no_workspaces():
        return lowtide.plan(build, step, **settings)


def llama_request(**settings: Any) -> Request:
    request = {
        name: settings.pop(name)
        for name in ("world", "rank", "steps", "device_memory")
        if name in settings
    }
    path = settings.pop("path", LLAMA)
    program = ModelFile(path, **{"config": "bytes", "sequence": 256} | settings)
    return Request(program, **request)


@contextlib.contextmanager
def no_workspaces() -> Iterator[None]:
    """cuBLAS takes none: figures are of the program's own tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        patch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
        yield


def unrecorded(*program: str, **machine: Any) -> dict[str, Any]:
    """What `lowtide phantom` finds of the device that the program used."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        run_dry(*program, machine=launch.Machine(**machine), report=report)
        (device,) = json.loads(report.read_text())["devices"]
        found: dict[str, Any] = device
        return found


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
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in "123"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.repeat(2, 1))


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
