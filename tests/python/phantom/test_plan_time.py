"""`lowtide plan --time`: the time of the last step beside its memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import lowtide
from lowtide.phantom import machines
from support import planned


def plan(*arguments, directory):
    return subprocess.run(
        [sys.executable, "-m", "lowtide", "plan", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("time")
    done = plan(
        *(planned.LLAMA, "--config", "tiny", "--sequence", "64", "--world", "4"),
        *("--gpu", "h200", "--time", "--trace", "step.trace", "--json", "plan.json"),
        directory=directory,
    )
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


def test_table_has_the_moments(written):
    _, table = written
    assert "Last step on H200 SXM 141GB, ms, simulated" in table
    assert "exposed" in table


def test_json_has_the_times_and_what_was_assumed(written):
    directory, _ = written
    time = json.loads((directory / "plan.json").read_text())["step_time"]
    phases = time["phases"]
    assert list(phases) == ["forward", "loss", "backward", "optimizer"]
    total = sum(phase["seconds"] for phase in phases.values())
    assert time["step"]["seconds"] == pytest.approx(total)
    assert phases["backward"]["compute"] > phases["forward"]["compute"] > 0
    assert time["collectives"]["all-gather"] > 0
    assert time["assumptions"]["accelerator"]["memory_bandwidth"] == 4.8e12


def test_trace_has_the_moments(written):
    directory, _ = written
    events = json.loads((directory / "step.trace").read_text())["traceEvents"]
    phases = [event["name"] for event in events if event.get("cat") == "phase"]
    assert phases == ["forward", "loss", "backward", "optimizer"]
    assert any(event.get("name") == "all-gather" for event in events)


def test_without_time_there_is_none():
    assert planned.plan_llama(config="tiny", sequence=64).step_time is None


def test_a_trace_wants_the_time(tmp_path):
    arguments = (planned.LLAMA, "--config", "tiny", "--trace", "step.trace")
    done = plan(*arguments, directory=tmp_path)
    assert done.returncode == 1
    assert (
        "lowtide: plan --trace: expected --time too, got none. Pass --time."
    ) in done.stderr


# -- will an offload pay? -------------------------------------------------------------

LAYERS, ROWS, WIDTH = 8, 1 << 16, 256
INPUT = 4 * ROWS * WIDTH


class Blocks(nn.Module):
    """Each keeps its input for backward and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks().to("cuda")
    return model, torch.optim.SGD(model.parameters())


def step(state: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = state
    model(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
    optimizer.step()


def test_an_offload_is_advised_with_what_its_copies_need():
    found = lowtide.plan(build, step, time=True)
    (offload,) = [saving for saving in found.savings if saving.what == "offload"]
    match = re.search(r"at (.+) of the link's (.+) GB/s .*: (.*)", offload.advice)
    assert match is not None
    needed, carried, verdict = match.groups()
    assert float(carried) == pytest.approx(0.85 * 63, abs=0.1)  # PCIe 5.0
    # All inputs but the first, the batch, and two that are on their way.
    assert found.step_time is not None
    moved = float(needed) * 1e9 * found.step_time.phases["forward"].seconds
    assert moved == pytest.approx((LAYERS - 1) * INPUT * (1 - 2 / LAYERS), rel=0.2)
    # Products this thin take less time than their inputs on a link.
    assert verdict == "compute would wait"


# -- which plans keep time -------------------------------------------------------------

PRODUCT = """
from pathlib import Path

import torch

x = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
optimizer = torch.optim.SGD([x])
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
y = x.detach() @ x
end.record()
y.sum().backward()
optimizer.step()
torch.cuda.synchronize()
Path("ms").write_text(str(begin.elapsed_time(end)))
"""


@pytest.mark.parametrize(("gpu", "keeps_time"), [("l40s", True), ("h100", False)])
def test_a_plan_keeps_time_where_links_are_slow(tmp_path, monkeypatch, gpu, keeps_time):
    """There gathers leave by what they take; without a clock any two events are a
    millisecond apart."""
    monkeypatch.chdir(tmp_path)
    plan = planned.plan_text(tmp_path, PRODUCT, gpu=gpu)
    assert plan.step_time is None
    ms = float((tmp_path / "ms").read_text())
    taken = 2 * 8192**3 / machines.accelerator_named(gpu).half * 1e3
    assert (ms > taken) == keeps_time and (ms == 1) == (not keeps_time)
