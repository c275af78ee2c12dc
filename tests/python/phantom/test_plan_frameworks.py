"""Training loops as the documentation of others writes them: accelerate, Lightning,
torchvision's reference, graphed callables. Figures are the models' own arithmetic."""

from __future__ import annotations

from lowtide.planning import Plan
from support import planned

WIDTH = 256
ATTENTION = 4 * WIDTH * WIDTH + 4 * WIDTH
NORM = 2 * WIDTH
ENCODER = ATTENTION + 2 * WIDTH * 1024 + 1024 + WIDTH + 2 * NORM


def require_state(plan: Plan, weights: float) -> None:
    """``weights``: bytes of a rank; no block is much larger than its tensor."""
    assert 1 <= plan.by_category["parameters"] / weights < 1.01
    assert 2 <= plan.by_category["optimizer_state"] / weights < 2.02


def test_a_loop_of_accelerate_with_fsdp2():
    plan = planned.plan_script("train_accelerate.py", "fsdp2", world=8)
    require_state(plan, (8192 * WIDTH + 4 * ENCODER + 16 * WIDTH + 16) * 4 / 8)
    assert plan.by_category["recomputed"] > 0  # its plugin's checkpointing


def test_lightnings_fsdp():
    plan = planned.plan_script("train_lightning.py", "fsdp", world=8)
    decoder = ENCODER + ATTENTION + NORM
    ends = 2 * 8192 * WIDTH + 8192 + 2 * NORM
    weights = (4 * ENCODER + 4 * decoder + ends) * 4 / 8
    require_state(plan, weights)
    assert 1 <= plan.by_category["gradients"] / weights < 1.01
    # Logits of 4 x 64 tokens in fp32, and what log_softmax leaves for backward.
    assert plan.peak_allocated > 2 * 4 * 64 * 8192 * 4


def test_a_vision_transformer_with_a_scaler_and_ddp():
    plan = planned.plan_script("train_vision.py", "vit_b_16", world=8)
    weights = 86_567_656 * 4
    require_state(plan, weights)
    assert 1 <= plan.by_category["communication"] / weights < 1.01  # DDP's buckets
    assert 1 <= plan.by_category["other"] / weights < 1.01  # the average
    assert plan.pinned > 16 * 3 * 224 * 224 * 4  # a batch of images


def test_graphed_callables():
    """A branch that nobody takes has graphs, too."""
    plan = planned.plan_script("train_graphed.py", "callables")
    weights = 3 * (1024 * 1024 + 1024) * 4
    assert 1 <= plan.by_category["parameters"] / weights < 1.01
    script = str(planned.SCRIPTS / "train_graphed.py")
    alone = planned.unrecorded(script, "callables")
    assert plan.peak_allocated == alone["allocated"]
    assert plan.peak_reserved == alone["reserved"]


def test_reduce_overhead_and_a_compiled_optimizer():
    plan = planned.plan_script("train_graphed.py", "compiled")
    require_state(plan, 2 * (1024 * 1024 + 1024) * 4)
    assert plan.steps == 3
