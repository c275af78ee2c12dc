"""Triton's kernels take their bytes' time on a program's timeline: those that inductor
wrote, and those of torch's own operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lowtide.phantom
from lowtide._torch_version import VERSION
from lowtide.phantom.dry.timekeeper import Span
from lowtide.phantom.machines import H100
from support.dry_process import call_dry

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")

NUM_ELEMENTS = 1 << 26


def compiled(before: bool) -> list[Span]:
    """Compiled before the timeline begins, or inside of it."""
    function = torch.compile(lambda x: F.gelu(x) * 2)
    x = torch.empty(NUM_ELEMENTS, device="cuda")
    if before:
        function(x)
    with lowtide.phantom.timeline() as time:
        function(x)
        begin = time.now()
        function(x)
    return [span for span in time.spans(begin) if span.kind == "kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_fused_kernel_reads_and_writes_its_tensors_once(before):
    (span,) = call_dry(compiled, before)
    assert span.name.startswith("triton_")
    assert span.bytes == 2 * NUM_ELEMENTS * 4
    seconds = span.bytes / (H100.memory_bandwidth * H100.memory_efficiency)
    assert span.end - span.begin == pytest.approx(seconds, rel=0.01)


def outer_products() -> list[Span]:
    """As rotary positions are computed."""
    a = torch.empty(4, 64, 1, device="cuda")
    b = torch.empty(4, 1, 4096, device="cuda")
    with lowtide.phantom.timeline() as time:
        a @ b
    return [span for span in time.spans() if span.kind == "kernel"]


@pytest.mark.skipif(VERSION < (2, 15), reason="torch has no kernel of Triton's for it")
def test_what_a_kernel_takes_for_a_tensor_counts_as_one():
    """torch wraps what its kernel only reads."""
    (span,) = call_dry(outer_products)
    assert "outer_product" in span.name
    assert span.bytes == 4 * 4 * (64 + 4096 + 64 * 4096)
