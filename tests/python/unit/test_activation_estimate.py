"""The estimate before running equals what the run then shows."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import lowtide
from lowtide import ActivationPolicy, checkpoint, estimate_offload
from support.blocks import (
    DIM,
    HIDDEN,
    HIDDEN_BYTES,
    RESIDUAL_BYTES,
    ROWS,
    rows,
    stack,
    step,
)

LAYERS = 6
FAST = {"link_bytes_per_second": 1e15, "flops_per_second": 1.0, "fixed_bytes": 0}
FLOPS = 2 * 2 * ROWS * DIM * HIDDEN


def wrapped(**policy) -> nn.Sequential:
    return stack(LAYERS, wrap=lambda m: checkpoint(m, ActivationPolicy(**policy)))


@pytest.mark.parametrize(
    ("policy", "without", "with_offload", "host"),
    [
        ({"offload": ["residual"]}, 6, 2, 6),
        ({"offload": ["input"], "prefetch": 2, "keep_last": 1}, 6, 4, 6),
    ],
    ids=str,
)
def test_bytes(policy: dict, without: int, with_offload: int, host: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate = estimate_offload(wrapped(**policy), rows(), **FAST)
    assert estimate.device_bytes_without == without * RESIDUAL_BYTES
    assert estimate.device_bytes_with == with_offload * RESIDUAL_BYTES
    assert estimate.host_bytes == host * RESIDUAL_BYTES
    assert estimate.hidden


def test_the_estimate_is_what_a_run_shows():
    model = wrapped(offload=["residual", "hidden"])
    estimate = estimate_offload(model, rows(), **FAST)
    assert {r.flops for r in estimate.regions.values()} == {FLOPS}
    assert list(estimate.regions) == [str(i) for i in range(LAYERS)]
    lowtide.memory_report(model, reset_peaks=True)
    step(model)
    activations = lowtide.memory_report(model).activations
    assert estimate.host_bytes == LAYERS * (RESIDUAL_BYTES + HIDDEN_BYTES)
    # Other tests of this process may have left their peak in the ledger before.
    moved = sum(name.moved_bytes for name in activations.names.values())
    assert estimate.host_bytes == moved


def test_a_slow_link_is_named_with_both_figures():
    model = wrapped(offload=["residual"])
    flops_per_second = 1e9
    needed = RESIDUAL_BYTES / (FLOPS / flops_per_second)
    with pytest.warns(UserWarning, match="lowtide: ") as caught:
        estimate = estimate_offload(
            model,
            rows(),
            link_bytes_per_second=needed / 4,
            flops_per_second=flops_per_second,
            fixed_bytes=0,
        )
    assert estimate.bytes_per_second_needed == pytest.approx(needed)
    forward = FLOPS / flops_per_second
    # A copy takes four forwards: three too long in forward, one in backward.
    assert estimate.exposed_seconds == pytest.approx(LAYERS * 4 * forward)
    assert str(caught[0].message) == (
        "lowtide: estimate_offload: expected a link of at least 0.0417 GB/s to hide "
        "the copies, got 0.0104 GB/s. A step will take 0.3 ms longer; offload less, or "
        "use larger batches or widths."
    )


def test_a_peak_that_is_not_activations_is_named():
    model = wrapped(offload=["residual"])
    with pytest.warns(UserWarning, match="expected activations to set the peak"):
        estimate = estimate_offload(
            model,
            rows(),
            link_bytes_per_second=1e15,
            flops_per_second=1.0,
            fixed_bytes=1 << 30,
        )
    assert estimate.share_of_peak < 1e-5
    assert "1 GiB of parameters, gradients and optimizer" in str(estimate)


def test_nothing_runs_and_nothing_is_counted():
    model = wrapped(offload=["residual"])
    estimate_offload(model, rows(), **FAST)
    assert lowtide.memory_report(model).activations.names["residual"].matched == 0
    assert torch.is_grad_enabled()
    step(model)


def test_models_it_can_not_estimate():
    with pytest.raises(ValueError, match="lowtide: ") as error:
        estimate_offload(stack(1), rows(), **FAST)
    assert str(error.value) == (
        "lowtide: estimate_offload: expected a model with checkpointed modules, got "
        "Sequential without. Call lowtide.checkpoint first."
    )
