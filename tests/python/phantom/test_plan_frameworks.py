"""Training loops as the documentation of others writes them: accelerate, Lightning,
torchvision's reference, graphed callables. Figures are the models' own arithmetic."""

from __future__ import annotations

import pytest

from support import planned, workspaces

WIDTH = 256
ATTENTION = 4 * WIDTH * WIDTH + 4 * WIDTH
NORM = 2 * WIDTH
ENCODER = ATTENTION + 2 * WIDTH * 1024 + 1024 + WIDTH + 2 * NORM


SEGMENT = 20 * 2**20


def require_state(held: dict[str, int], weights: float) -> None:
    """``weights``: bytes of a rank; no block is much larger than its tensor."""
    assert 1 <= held["parameters"] / weights < 1.01
    assert 2 <= held["optimizer_state"] / weights < 2.02


def test_a_loop_of_accelerate_with_fsdp2():
    plan = planned.plan_script("train_accelerate.py", "fsdp2", world=8)
    require_state(
        plan.by_category, (8192 * WIDTH + 4 * ENCODER + 16 * WIDTH + 16) * 4 / 8
    )
    assert plan.by_category["recomputed"] > 0  # its plugin's checkpointing


def test_lightnings_fsdp():
    plan = planned.plan_script("train_lightning.py", "fsdp", world=8)
    decoder = ENCODER + ATTENTION + NORM
    ends = 2 * 8192 * WIDTH + 8192 + 2 * NORM
    weights = (4 * ENCODER + 4 * decoder + ends) * 4 / 8
    require_state(plan.by_category, weights)
    if workspaces.KEPT:  # else the peak is a product's, before there are any
        assert 1 <= plan.by_category["gradients"] / weights < 1.01
    # Logits of 4 x 64 tokens in fp32, and what log_softmax leaves for backward.
    assert plan.peak_allocated > 2 * 4 * 64 * 8192 * 4


@pytest.mark.slow
def test_a_vision_transformer_with_a_scaler_and_ddp():
    plan = planned.plan_script("train_vision.py", "vit_b_16", world=8)
    weights = 86_567_656 * 4
    require_state(plan.by_category, weights)
    assert 1 <= plan.by_category["communication"] / weights < 1.01  # DDP's buckets
    assert 1 <= plan.by_category["other"] / weights < 1.01  # the average
    assert plan.pinned > 16 * 3 * 224 * 224 * 4  # a batch of images


@pytest.mark.slow
def test_graphed_callables():
    """A branch that nobody takes has graphs, too. What a backward leaves is freed by
    autograd's own thread while the program goes on: which segments a capture then
    finds is a race of torch's, here of one or two."""
    plan = planned.plan_script("train_graphed.py", "callables")
    weights = 3 * (1024 * 1024 + 1024) * 4
    assert 1 <= plan.by_category["parameters"] / weights < 1.01
    script = str(planned.SCRIPTS / "train_graphed.py")
    alone = planned.unrecorded(script, "callables")
    assert plan.peak_allocated == alone["allocated"]
    assert abs(plan.peak_reserved - alone["reserved"]) <= 2 * SEGMENT


@pytest.mark.slow
def test_reduce_overhead_and_a_compiled_optimizer():
    plan = planned.plan_script("train_graphed.py", "compiled")
    # The peak may be the first step's: inductor tries kernels where its cache has none.
    require_state(plan.moments["backward"].by_category, 2 * (1024 * 1024 + 1024) * 4)
    assert plan.steps == 3
