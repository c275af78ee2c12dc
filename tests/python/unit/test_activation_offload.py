"""Bytes: offloaded values leave the device, are on the host exactly once, and a report
says so."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import _C, ActivationPolicy, checkpoint
from lowtide._activation.regions import region_state
from support.blocks import (
    HIDDEN_BYTES,
    RESIDUAL_BYTES,
    Mlp,
    assert_same_bits,
    rows,
    stack,
    step,
)

CPU = torch.device("cpu")


def wrapped(num_layers: int, **policy) -> nn.Sequential:
    return stack(num_layers, wrap=lambda m: checkpoint(m, ActivationPolicy(**policy)))


def held_after_forward(num_layers: int, **policy) -> tuple[int, int]:
    """(device, host) bytes held for backward at the end of a steady forward."""
    model = wrapped(num_layers, **policy)
    step(model)
    x = rows().requires_grad_()
    gc.collect()
    with _C.AllocationTimeline(CPU) as timeline:
        loss = (model(x * 1.0) ** 2).sum()
        device = timeline.samples()["total"][-1]
    transfers = region_state(model[0]).region.transfers
    host = transfers.host_ledger.total_live if transfers else 0
    loss.backward()
    assert transfers is None or transfers.host_ledger.total_live == 0
    return device, host


def per_layer(**policy) -> tuple[int, int]:
    few, many = held_after_forward(4, **policy), held_after_forward(12, **policy)
    return (many[0] - few[0]) // 8, (many[1] - few[1]) // 8


@pytest.mark.parametrize(
    ("policy", "device", "host"),
    [
        ({}, RESIDUAL_BYTES, 0),
        ({"save": ["hidden"]}, RESIDUAL_BYTES + HIDDEN_BYTES, 0),
        ({"offload": ["hidden"]}, RESIDUAL_BYTES, HIDDEN_BYTES),
        ({"offload": ["residual"]}, 0, RESIDUAL_BYTES),
        ({"offload": ["input"]}, 0, RESIDUAL_BYTES),
        ({"offload": ["residual", "hidden"]}, 0, RESIDUAL_BYTES + HIDDEN_BYTES),
    ],
    ids=str,
)
def test_bytes_a_layer(policy: dict, device: int, host: int) -> None:
    assert per_layer(**policy) == (device, host)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_device_holds_one_residual_more_than_the_prefetch(prefetch: int) -> None:
    policy = {"offload": ["residual"], "prefetch": prefetch}
    with_offload, host = held_after_forward(8, **policy)
    without, _ = held_after_forward(8)
    assert host == 8 * RESIDUAL_BYTES
    # Without offload the device holds every region's argument; with it, those of
    # the newest 1 + prefetch regions.
    assert without - with_offload == (8 - (1 + prefetch)) * RESIDUAL_BYTES


def test_keep_last_leaves_the_last_values_on_the_device():
    policy = {"offload": ["residual"], "prefetch": 0, "keep_last": 3}
    device, host = held_after_forward(8, **policy)
    assert host == 5 * RESIDUAL_BYTES
    without, _ = held_after_forward(8)
    assert without - device == (8 - 4) * RESIDUAL_BYTES


def test_slots_are_registered_once():
    model = wrapped(4, offload=["residual"])
    step(model)
    pool = region_state(model[0]).region.transfers.pool_figures
    before = pool()["num_registrations"]
    for _ in range(3):
        step(model)
    assert pool()["num_registrations"] == before


def test_retain_graph_copies_back_twice_to_the_same_bits():
    model = wrapped(4, offload=["residual", "hidden"])
    x = rows().requires_grad_()
    loss = (model(x * 1.0) ** 2).sum()
    loss.backward(retain_graph=True)
    first = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    ledger = region_state(model[0]).region.transfers.host_ledger
    assert ledger.total_live == 4 * (RESIDUAL_BYTES + HIDDEN_BYTES)
    x.grad = None
    model.zero_grad()
    loss.backward()
    second = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    assert_same_bits(second, first)
    # Gone with the graph, not with the loss.
    assert ledger.total_live == 0
    assert loss.item() == loss.item()


def test_an_exception_gives_every_byte_back():
    class Bomb(nn.Module):
        armed = True

        def forward(self, x):
            if self.armed and torch.is_grad_enabled():
                raise RuntimeError("boom")
            return x

    bomb = Bomb()
    model = nn.Sequential(*wrapped(3, offload=["residual"]), bomb)
    with pytest.raises(RuntimeError, match="boom"):
        model(rows().requires_grad_() * 1.0)
    gc.collect()
    transfers = region_state(model[0]).region.transfers
    assert transfers.host_ledger.total_live == 0
    bomb.armed = False
    assert_same_bits(step(model), step(stack(3)))


def test_values_copied_back_are_in_the_devices_ledger():
    model = wrapped(6, offload=["residual"], prefetch=1)
    lowtide.memory_report(model, reset_peaks=True)
    step(model)
    report = lowtide.memory_report(model)
    assert report.categories["activations"].peak == 2 * RESIDUAL_BYTES
    assert report.categories["activations"].planned == 2 * RESIDUAL_BYTES
    assert report.categories["activations"].live == 0


def test_the_report_says_what_became_of_every_name():
    model = wrapped(4, offload=["residual"], save=["hidden"], recompute=["norm"])
    step(model)
    lowtide.memory_report(model, reset_peaks=True)
    step(model)
    report = lowtide.memory_report(model)
    activations = report.activations
    assert activations is not None
    assert activations.num_regions == 4
    residual, hidden = activations.names["residual"], activations.names["hidden"]
    assert (residual.treatment, residual.matched, residual.moved) == ("offload", 4, 4)
    assert residual.moved_bytes == residual.host_peak == 4 * RESIDUAL_BYTES
    assert residual.host_live == 0
    assert (hidden.treatment, hidden.kept) == ("save", 4)
    assert hidden.kept_bytes == 4 * HIDDEN_BYTES and hidden.moved_bytes == 0
    assert activations.names["norm"].recomputed == 4
    assert activations.problems == []
    assert activations.device_peak == 2 * RESIDUAL_BYTES
    assert activations.peak_moment == "forward of checkpoint(Mlp)"
    assert (activations.fetched_ahead, activations.fetched_inline) == (2, 0)
    assert activations.exposed_wait > 0
    text = str(report)
    assert "residual               offload        4" in text
    assert "2.00 KiB" in text
    assert report.to_dict()["activations"]["names"]["residual"]["moved"] == 4


def test_the_report_names_problems_before_a_backward_raises_them():
    model = wrapped(2, offload=["residal"])
    model(rows().requires_grad_())
    problems = lowtide.memory_report(model).activations.problems
    assert len(problems) == 1 and "Did you mean 'residual'" in problems[0]
    assert "problem: lowtide: ActivationPolicy.offload" in str(
        lowtide.memory_report(model)
    )


def test_a_report_needs_something_to_report():
    with pytest.raises(ValueError, match="lowtide: ") as error:
        lowtide.memory_report(nn.Linear(2, 2))
    assert str(error.value) == (
        "lowtide: memory_report: expected a model sharded or checkpointed by lowtide, "
        "got Linear without a unit or a checkpointed module. Call lowtide.fully_shard "
        "or lowtide.checkpoint first."
    )


def test_beyond_the_cap_copies_use_pageable_memory_and_say_so():
    code = (
        "import warnings, lowtide\n"
        "from support.blocks import *\n"
        "policy = lowtide.ActivationPolicy(offload=['residual'])\n"
        "model = stack(4, wrap=lambda m: lowtide.checkpoint(m, policy))\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    assert_same_bits(step(model), step(stack(4)))\n"
        "print(len(caught), caught[0].message)\n"
        "print(lowtide.memory_report(model).activations.pageable_peak)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {
            "LOWTIDE_PINNED_BYTES": str(2 * RESIDUAL_BYTES),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first.startswith(
        "1 lowtide: host memory for activations: expected at most 1024 page-locked "
        "bytes, and the system to give them, got a request for 512 more."
    )
    assert second == str(2 * RESIDUAL_BYTES)


def test_a_skip_connection_is_copied_once():
    class Net(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([wrap(Mlp()) for _ in range(3)])

        def forward(self, x):
            first = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](first)) + self.blocks[2](first)

    torch.manual_seed(1)
    plain = Net(lambda m: m)
    torch.manual_seed(1)
    policy = ActivationPolicy(offload=["residual"])
    ours = Net(lambda m: checkpoint(m, policy))
    assert_same_bits(step(ours), step(plain))
    residual = lowtide.memory_report(ours).activations.names["residual"]
    assert (residual.matched, residual.moved, residual.shared) == (4, 3, 1)


def test_a_module_that_runs_several_times_is_several_regions():
    class Looped(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.block = wrap(stack(1)[0])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.block(x)
            return x

    policy = ActivationPolicy(offload=["residual"], save=["hidden"])
    ours = Looped(lambda block: checkpoint(block, policy))
    plain = Looped(lambda block: block)
    for _ in range(2):
        assert_same_bits(step(ours), step(plain))
    names = lowtide.memory_report(ours).activations.names
    assert names["residual"].moved_bytes == 2 * 3 * RESIDUAL_BYTES
    assert names["hidden"].kept == 2 * 3
