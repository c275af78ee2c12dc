"""LOWTIDE_DEBUG and LOWTIDE_DEBUG_LOG compare values; the dry driver has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from support.dry_process import call_dry


def refusals(folder: Path) -> list[str]:
    import torch.distributed as dist
    from torch import nn

    import lowtide

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    said = []

    def forward() -> None:
        model = nn.Linear(2, 2, device="cuda")
        lowtide.fully_shard(model)
        model(torch.ones(1, 2, device="cuda"))

    for name in ("LOWTIDE_DEBUG", "LOWTIDE_DEBUG_LOG"):
        os.environ[name] = "1" if name == "LOWTIDE_DEBUG" else str(folder / "log")
        with pytest.raises(ValueError, match=name) as raised:
            forward()
        said.append(str(raised.value))
        del os.environ[name]
    assert not (folder / "log").exists()
    return said


def test_values_that_are_none_are_not_compared(tmp_path):
    assert call_dry(refusals, tmp_path) == [
        f"lowtide: {name}: expected a device that computes, got the dry driver, under "
        "which there are no values to compare. Unset it for `lowtide plan` and "
        "`lowtide phantom`."
        for name in ("LOWTIDE_DEBUG", "LOWTIDE_DEBUG_LOG")
    ]
