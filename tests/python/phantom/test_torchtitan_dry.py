"""torchtitan 0.3 and later over the driver that computes nothing: what gloo does
not have. Experts over ranks, and forward and backward in a CUDA graph, its default."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.phantom.dry import driver, launch
from support import titan_on_cpus
from support.dry_process import call_dry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch"),
    pytest.mark.skipif(not titan_on_cpus.HAS_CONFIGS, reason="an older torchtitan"),
]
STEPS = 4


def train(system: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Calls of NCCL by kind, addresses of gradients after each step, reserved bytes."""
    from lowtide.integrations.torchtitan import parallelize_fn

    titan_on_cpus.stand_in_for_absent()
    # torchao 0.18's kernels are refused by the triton of torch 2.15 where there is a
    # GPU; torchtitan goes on without them.
    sys.modules["torchao.prototype.moe_training"] = None  # type: ignore[assignment]
    from support import titan_configs

    change = parallelize_fn if system == "lowtide" else lambda theirs: theirs
    trainer = titan_configs.trainer_of(change, folder, STEPS, saves=False, **settings)
    gradients: list[list[int]] = []
    (model,) = trainer.model_parts

    def note_gradients(*_: Any) -> None:
        gradients.append([p.grad._local_tensor.data_ptr() for p in model.parameters()])

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(note_gradients)
    trainer.train()
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    trainer.close()
    return {
        "calls": Counter(call.kind for call in driver.calls()),
        "gradients": gradients,
        "reserved": reserved,
    }


def both(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    machine = launch.Machine(world=8)
    return [
        call_dry(train, system, folder, settings, machine=machine)
        for system in ("fsdp2", "lowtide")
    ]


def test_forward_and_backward_are_captured(tmp_path):
    """After an eager step; what is replayed writes the gradients that it wrote then."""
    theirs, ours = both(tmp_path, graphs=True)
    for found in (theirs, ours):
        assert len(found["gradients"]) == STEPS
        assert found["gradients"][1:] == [found["gradients"][1]] * (STEPS - 1)
    assert ours["reserved"] <= theirs["reserved"]


def test_experts_over_ranks(tmp_path):
    settings = {"model": "deepseek_v3", "expert_parallel_degree": 4}
    theirs, ours = both(tmp_path, **settings)
    assert ours["calls"]["all_to_all"] == theirs["calls"]["all_to_all"] > 0
    assert ours["reserved"] <= theirs["reserved"]
