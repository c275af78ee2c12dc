"""The report's exposed wait on the simulated device: what compute stands still for
while a timeline runs, nothing otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide import ActivationPolicy
from support.phantom import PhantomOf

LAYERS, ROWS, WIDTH = 6, 1024, 256
RESIDUAL_BYTES = 4 * ROWS * WIDTH


def exposed(host_bandwidth: float | None, prefetch: int) -> tuple[float | None, str]:
    """In a step of checkpointed layers whose kernels take no time."""
    from lowtide.phantom import machines

    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model.to("phantom")
    for layer in model:
        lowtide.checkpoint(
            layer, ActivationPolicy(offload=["input"], prefetch=prefetch)
        )
    x = torch.zeros(ROWS, WIDTH, device="phantom", requires_grad=True)

    def step() -> None:
        model(x * 1.0).sum().backward()

    step()
    lowtide.memory_report(model, reset_peaks=True)
    if host_bandwidth is None:
        step()
        report = lowtide.memory_report(model)
    else:
        machine = machines.Accelerator(
            "free",
            *[1e30] * 6,
            product_efficiency=1,
            attention_efficiency=1,
            memory_efficiency=1,
            kernel_floor=0,
            host_bandwidth=host_bandwidth,
        )
        with lowtide.phantom.timeline(machine, issue_cost=0):
            step()
            report = lowtide.memory_report(model)
    return report.activations.exposed_wait, str(report)


def test_without_a_timeline_it_is_not_measured(phantom: PhantomOf) -> None:
    seconds, text = phantom("meta").run(exposed, None, 1)
    assert seconds is None
    assert "exposed wait: not measured on this device" in text


def test_it_is_the_time_of_copies_that_nothing_hides(phantom: PhantomOf) -> None:
    seconds, text = phantom("meta").run(exposed, RESIDUAL_BYTES, 1)
    # All leave, one a second; the newest two were never let go and do not come back.
    # The two directions of the link overlap at most while those two leave.
    assert LAYERS + (LAYERS - 2) - 2 <= seconds <= LAYERS + (LAYERS - 2)
    assert f"exposed wait: {seconds * 1e3:.1f} ms" in text
    # In a process of its own: slots of the pool remember the first timeline.
    fast = phantom("meta", capacity=1 << 40)
    ten_a_second, _ = fast.run(exposed, 10 * RESIDUAL_BYTES, 1)
    assert ten_a_second == pytest.approx(seconds / 10)
