"""Kernels that inductor wrote take their bytes' time on a program's timeline."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lowtide.phantom
from lowtide.phantom.dry.timekeeper import Span
from lowtide.phantom.machines import H100
from support.dry_process import call_dry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch"),
]

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


@pytest.mark.parametrize("before", [True, False])
def test_a_fused_kernel_reads_and_writes_its_tensors_once(before):
    (span,) = call_dry(compiled, before)
    assert span.name.startswith("triton_")
    assert span.bytes == 2 * NUM_ELEMENTS * 4
    seconds = span.bytes / (H100.memory_bandwidth * H100.memory_efficiency)
    assert span.end - span.begin == pytest.approx(seconds, rel=0.01)
