"""What a device holds beside torch's allocator is in the report: NCCL's buffers, say."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import ActivationPolicy
from lowtide.memory import human
from support.dry_process import call_dry

MIB = 1 << 20


def reports() -> list[tuple[Any, str]]:
    """Before and after a library has taken memory."""
    layer = lowtide.checkpoint(nn.Linear(8, 8).to("cuda"), ActivationPolicy())
    found = []
    for _ in range(2):
        report = lowtide.memory_report(layer)
        assert report.accelerator is not None
        reserved = torch.cuda.memory_reserved()
        found.append(((reserved, report.accelerator), str(report)))
        ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), 64 * MIB)
    return found


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_memory_that_torch_does_not_allocate_is_reported():
    ((reserved, before), _), ((_, after), text) = call_dry(reports)
    assert before.reserved == after.reserved == reserved > 0
    assert after.outside - before.outside == 64 * MIB
    assert before.total == after.total > after.reserved + after.outside
    assert f"{human(after.outside)} outside (context, NCCL, other processes)" in text
