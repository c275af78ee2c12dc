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
HEAD_BYTES = 2048 * 256 * 4  # of the debug model's gradient


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
        "reduced": sum(c.bytes for c in driver.calls() if c.kind == "reduce_scatter"),
        "gradients": gradients,
        "reserved": reserved,
    }


MACHINE = launch.Machine(world=8)


def test_forward_and_backward_in_a_graph(tmp_path):
    """They are captured after an eager step, and what is replayed writes the gradients
    that it wrote then. Nothing of layers is reduced behind a chunk of the loss; norm
    and head, one unit, leave whole with either's gradients."""
    theirs, ours = (
        call_dry(train, system, tmp_path, {"graphs": True}, machine=MACHINE)
        for system in ("fsdp2", "lowtide")
    )
    for run in (theirs, ours):
        assert len(run["gradients"]) == STEPS
        assert run["gradients"][1:] == [run["gradients"][1]] * (STEPS - 1)
    theirs_and_a_head = theirs["reduced"] + 2 * HEAD_BYTES
    assert theirs["reduced"] <= ours["reduced"] < 1.01 * theirs_and_a_head
    assert ours["reserved"] <= theirs["reserved"]


def test_experts_over_ranks(tmp_path):
    settings = {"model": "deepseek_v3", "expert_parallel_degree": 4}
    theirs, ours = (
        call_dry(train, system, tmp_path, settings, machine=MACHINE)
        for system in ("fsdp2", "lowtide")
    )
    assert ours["calls"]["send"] == theirs["calls"]["send"] > 0  # of tokens
    assert ours["reserved"] <= theirs["reserved"]
