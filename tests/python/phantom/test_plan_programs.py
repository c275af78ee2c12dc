"""Training programs as others write them, for CUDA and NCCL, run unchanged. Recording
one changes no byte: peaks are those of `lowtide phantom`."""

from __future__ import annotations

import pytest

from lowtide.planning import Plan, plan_request
from lowtide.planning.request import Request, Script
from support import dry_programs, planned


def require_peaks_of_an_unrecorded_run(plan: Plan, *program: str, **machine) -> None:
    alone = planned.unrecorded(*program, **machine)
    assert plan.peak_allocated == alone["allocated"]
    assert plan.peak_reserved == alone["reserved"]
    assert sum(plan.by_category.values()) == plan.peak_allocated
    assert plan.by_category.get("other", 0) < 0.01 * plan.peak_allocated


@pytest.mark.slow
def test_ddp():
    settings = {"world": 8, "rank": 3}
    plan = planned.plan_script("train_ddp.py", **settings)
    weights = (784 * 2048 + 2048 * 2048 + 2048 * 10) * 4
    for category in ("parameters", "gradients", "optimizer_state"):
        assert 1 <= plan.by_category[category] / weights < 1.01, category
    buckets = plan.by_category["communication"]
    assert 1 <= buckets / weights < 1.01
    # Where steps take less than NCCL's watchdog to look, the first ones live on.
    alone = planned.unrecorded(str(planned.SCRIPTS / "train_ddp.py"), **settings)
    assert 0 <= alone["allocated"] - plan.peak_allocated < 1.01 * buckets


@pytest.mark.slow
def test_fsdp2_with_streams_events_and_microbatches():
    settings = {"world": 4, "rank": 1}
    plan = planned.plan_script("train_fsdp2.py", **settings)
    weights = (2 * 4096 * 512 + 6 * (8 * 512 * 512 + 512)) * 4
    assert 1 <= plan.by_category["parameters"] / (weights / 4) < 1.01
    assert 1 <= plan.by_category["optimizer_state"] / (2 * weights / 4) < 1.01
    names = {row.name for row in plan.largest if row.category == "gradients"}
    assert names == {"blocks.*.down.weight"} or names == {"blocks.*.up.weight"}
    assert plan.peak_reserved_bound >= plan.peak_reserved
    assert plan.pinned >= 4 * 257 * 8  # a batch
    script = str(planned.SCRIPTS / "train_fsdp2.py")
    require_peaks_of_an_unrecorded_run(plan, script, **settings)


def test_every_mechanism_of_lowtide():
    script = "train_every_mechanism.py"
    plan = planned.plan_script(script, "exact", world=8)
    assert plan.lowtide is not None
    assert "shard" not in [saving.what for saving in plan.savings]
    weights = (2 * 8192 * 512 + 3 * 2 * 512 * 2048) * 4
    assert 1 <= plan.by_category["parameters"] / (weights / 4) < 1.01
    assert plan.by_category["activations"] > 0
    # A residual copied back for backward.
    assert plan.lowtide["categories"]["activations"]["peak"] >= 256 * 512 * 2
    script = str(planned.SCRIPTS / script)
    require_peaks_of_an_unrecorded_run(plan, script, "exact", world=8)


@pytest.mark.slow
def test_one_gpu_with_compiler_autocast_and_scaler():
    arguments = ("--dim", "128", "--layers", "1", "--epochs", "1")
    plan = planned.plan_script("train_single_gpu.py", *arguments)
    assert plan.steps == 3 and plan.notes == []
    assert plan.program.endswith("train_single_gpu.py " + " ".join(arguments))
    # The first step may take more: inductor tries kernels where its cache has none.
    held = plan.moments["forward"].by_category
    weights = (256 + 64 + 12 * 128 + 256) * 128 * 4
    assert 1 <= held["parameters"] / weights < 1.05
    assert 2 <= held["optimizer_state"] / weights < 2.1
    lines = {row.line for row in plan.largest if row.category == "activations"}
    (line,) = lines  # of the compiled function, and none that inductor wrote
    assert "train_single_gpu.py:" in line and line.endswith(" GPT.forward")


@pytest.mark.slow
def test_torchvision():
    plan, *program = planned_of_others("resnet50")
    # Weights and momenta; no block is more than 1 MiB larger than its tensor.
    held = plan.by_category["parameters"] + plan.by_category["optimizer_state"]
    assert 1 <= held / (2 * 25_557_032 * 4) < 1.04
    require_peaks_of_an_unrecorded_run(plan, *program)


@pytest.mark.slow
def test_transformers():
    plan, *program = planned_of_others("hf_trainer")
    blocks = 4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408 + 2 * 512)
    weights = (2 * 32000 * 512 + 512 + blocks) * 4
    assert 1 <= plan.by_category["parameters"] / weights < 1.01
    assert 2 <= plan.by_category["optimizer_state"] / weights < 2.04
    require_peaks_of_an_unrecorded_run(plan, *program)


@pytest.mark.slow
def test_top_k_experts():
    plan, *program = planned_of_others("top_k_experts")
    require_peaks_of_an_unrecorded_run(plan, *program)


@pytest.mark.slow
def test_a_whole_step_in_a_cuda_graph():
    """After three of warm-up on a stream of their own, none of which ends the plan."""
    plan, *program = planned_of_others("cuda_graph")
    assert (plan.steps, plan.peak_step) == (4, 4)
    require_peaks_of_an_unrecorded_run(plan, *program)


@pytest.mark.slow
def test_a_whole_step_of_units_in_a_cuda_graph():
    """Its memory is the graph's own, beside what eager steps left."""
    machine = {"world": 8}
    plan, *program = planned_of_others("sharded_cuda_graph", **machine)
    assert (plan.steps, plan.peak_step) == (4, 4)
    assert plan.lowtide is not None
    require_peaks_of_an_unrecorded_run(plan, *program, **machine)


def planned_of_others(name: str, **machine: int) -> tuple[Plan, str, str]:
    program = (dry_programs.__file__, name)
    return plan_request(Request(Script(program), **machine)), *program
