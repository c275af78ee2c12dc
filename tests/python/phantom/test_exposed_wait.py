"""The report's exposed wait, dry: what compute stands still for while time is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
import lowtide.phantom
from lowtide import ActivationPolicy
from lowtide.phantom import machines
from support.dry_process import call_dry

LAYERS, ROWS, WIDTH = 6, 1024, 256
RESIDUAL_BYTES = 4 * ROWS * WIDTH
# Kernels and calls take no time.
FREE = machines.Accelerator(
    "free",
    *[1e30] * 6,
    product_efficiency=1,
    attention_efficiency=1,
    memory_efficiency=1,
    kernel_floor=0,
    block_seconds=0,
)
NOTHING = machines.Host(0, 0, 0, 0, 0)


def exposed(host_bandwidths: list[float]) -> list[tuple[float | None, str]]:
    """In a step of checkpointed layers, for links of so many bytes per second."""
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model.to("cuda")
    for layer in model:
        lowtide.checkpoint(layer, ActivationPolicy(offload=["input"], prefetch=1))
    x = torch.zeros(ROWS, WIDTH, device="cuda", requires_grad=True)

    def step() -> None:
        model(x * 1.0).sum().backward()

    step()
    found = []
    for bandwidth in host_bandwidths:
        lowtide.memory_report(model, reset_peaks=True)
        machine = dataclasses.replace(FREE, host_bandwidth=bandwidth)
        with lowtide.phantom.timeline(machine, host=NOTHING):
            step()
            report = lowtide.memory_report(model)
        found.append((report.activations.exposed_wait, str(report)))
    return found


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_it_is_the_time_of_copies_that_nothing_hides() -> None:
    links = [float(RESIDUAL_BYTES), 10.0 * RESIDUAL_BYTES]
    (seconds, text), (ten_a_second, _) = call_dry(exposed, links)
    # All leave, one a second; the newest two were never let go and do not come back.
    # The two directions of the link overlap at most while those two leave.
    assert LAYERS + (LAYERS - 2) - 2 <= seconds <= LAYERS + (LAYERS - 2)
    assert f"exposed wait: {seconds * 1e3:.1f} ms" in text
    assert ten_a_second == pytest.approx(seconds / 10)
