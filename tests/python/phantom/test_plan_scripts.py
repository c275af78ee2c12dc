"""Training scripts as users write them, for CUDA and NCCL, run unchanged."""

from __future__ import annotations

import pytest

from support import planned

MIB = 1 << 20


@pytest.fixture(scope="module")
def single():
    return planned.plan_script("train_single_gpu.py", "--dim", "128")


def test_one_gpu_with_autocast_and_a_scaler(single):
    assert (single.steps, single.peak_moment) == (3, "backward")
    assert single.program.endswith("train_single_gpu.py --dim 128")
    # fp16 copies of the weights that autocast keeps.
    assert single.by_category["gathered_parameters"] > 0
    assert single.by_category["optimizer_state"] >= 2 * single.by_category["parameters"]
    assert {s.what for s in single.savings} >= {"checkpoint"}


def test_what_was_skipped_is_said(single):
    assert single.notes == [
        "torch.compile was skipped: the figures are those of eager mode"
    ]


def test_ddp():
    plan = planned.plan_script("train_ddp.py", world=8, rank=3)
    weights = (784 * 2048 + 2048 * 2048 + 2048 * 10) * 4
    for category in ("parameters", "gradients", "optimizer_state", "communication"):
        assert 1 <= plan.by_category[category] / weights < 1.01, category
    assert plan.notes == [
        "DDP keeps its first bucket instead of cutting it into smaller ones"
    ]


def test_fsdp2_with_streams_events_and_microbatches():
    plan = planned.plan_script("train_fsdp2.py", world=4, rank=1)
    weights = (2 * 4096 * 512 + 6 * (8 * 512 * 512 + 512)) * 4
    assert 1 <= plan.by_category["parameters"] / (weights / 4) < 1.01
    assert 1 <= plan.by_category["optimizer_state"] / (2 * weights / 4) < 1.01
    names = {row.name for row in plan.largest if row.category == "gradients"}
    assert names == {"blocks.*.down.weight"} or names == {"blocks.*.up.weight"}
    assert plan.peak_reserved_bound >= plan.peak_reserved


def test_every_rank_has_its_own_plan():
    """512 rows of the last weight over 3 ranks: 171, 171, 170."""
    plans = [
        planned.plan_script("train_fsdp2.py", world=3, rank=rank) for rank in (0, 2)
    ]
    assert [plan.rank for plan in plans] == [0, 2]
    assert plans[0].by_category["parameters"] >= plans[1].by_category["parameters"]


def test_every_mechanism_together():
    plan, simulated = (
        planned.plan_script("train_every_mechanism.py", "exact", world=8, gpu=gpu)
        for gpu in ("h100", None)
    )
    assert plan.by_category == simulated.by_category
    assert plan.lowtide is not None and simulated.lowtide is not None
    assert plan.lowtide["categories"] == simulated.lowtide["categories"]
    assert "shard" not in [saving.what for saving in plan.savings]
    weights = (2 * 8192 * 512 + 3 * 2 * 512 * 2048) * 4
    assert 1 <= plan.by_category["parameters"] / (weights / 4) < 1.01
    assert plan.by_category["activations"] > 0
    # A residual copied back for backward.
    assert plan.lowtide["categories"]["activations"]["peak"] >= 256 * 512 * 2
