"""torchtitan 0.3 and later over the driver that computes nothing: what gloo does
not have. Experts over ranks, and forward and backward in a CUDA graph, its default."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
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
WORLD = 8
HEAD_BYTES = 2048 * 256 * 4  # of the debug model's gradient
NORM_BYTES = 256 * 4
# By the ranks of the group, kind and reduction: how many calls there are, and bytes.
Sent = dict[tuple[tuple[int, ...], str, str], list[int]]


def sent(calls: Sequence[driver.Call]) -> Sent:
    ranks = {each.number: each.ranks for each in driver.communicators()}
    found: Sent = defaultdict(lambda: [0, 0])
    for call in calls:
        of = found[ranks[call.communicator], call.kind, call.reduction]
        of[0] += 1
        of[1] += call.bytes
    return dict(found)


def train(system: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the last step asks of NCCL, bytes that all steps reduce, addresses of
    gradients after each step, reserved bytes."""
    from lowtide.integrations.torchtitan import parallelize_fn

    titan_on_cpus.stand_in_for_absent()
    # torchao 0.18's kernels are refused by the triton of torch 2.15 where there is a
    # GPU; torchtitan goes on without them.
    sys.modules["torchao.prototype.moe_training"] = None  # type: ignore[assignment]
    from support import titan_configs

    change = parallelize_fn if system == "lowtide" else lambda theirs: theirs
    trainer = titan_configs.trainer_of(change, folder, STEPS, saves=False, **settings)
    gradients: list[list[int]] = []
    ends: list[int] = []
    (model,) = trainer.model_parts

    def note_gradients(*_: Any) -> None:
        ends.append(driver.num_calls())
        gradients.append([p.grad._local_tensor.data_ptr() for p in model.parameters()])

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(note_gradients)
    trainer.train()
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    trainer.close()
    return {
        "sent": sent(driver.calls()[ends[-2] : ends[-1]]),
        "reduced": sum(c.bytes for c in driver.calls() if c.kind == "reduce_scatter"),
        "gradients": gradients,
        "reserved": reserved,
    }


MACHINE = launch.Machine(world=WORLD)


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
    """Each group carries what it carries with FSDP2, which gathers norm and head once
    more between the model's forward and the loss; lowtide reduces them once more,
    behind the chunks, and pads what each rank gets of a reduction to 512 bytes."""
    settings = {"model": "deepseek_v3", "expert_parallel_degree": 4}
    theirs, ours = (
        call_dry(train, system, tmp_path, settings, machine=MACHINE)
        for system in ("fsdp2", "lowtide")
    )
    everyone, of_tokens, of_an_expert = tuple(range(WORLD)), (0, 1, 2, 3), (0, 4)
    assert ours["sent"].keys() == theirs["sent"].keys()
    assert {of[0] for of in ours["sent"]} == {everyone, of_tokens, of_an_expert}
    head = (HEAD_BYTES + NORM_BYTES) // 2 // WORLD  # a rank's, in bf16
    gathered_less = {everyone: head, of_an_expert: 0}
    reduced_more = {everyone: HEAD_BYTES + NORM_BYTES, of_an_expert: 0}
    for of, (count, num_bytes) in ours["sent"].items():
        ranks, kind, _ = of
        expected = theirs["sent"][of][1]
        if kind == "all_gather":
            assert num_bytes == expected - gathered_less[ranks], of
        elif kind == "reduce_scatter":
            padding = num_bytes - expected - reduced_more[ranks]
            assert 0 <= padding <= 512 * len(ranks) * count, of
        else:
            assert [count, num_bytes] == theirs["sent"][of], of
    assert ours["sent"][of_tokens, "send", "-"][0] > 0
    assert ours["reserved"] <= theirs["reserved"]
