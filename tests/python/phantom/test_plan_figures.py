"""What `lowtide plan` reports is what the program holds: by arithmetic over its shapes,
and by a run that nobody listens to."""

from __future__ import annotations

import pytest
import torch

import lowtide
from llama import CONFIGS, Llama
from lowtide.planning.request import ModelFile
from support import planned

MIB = 1 << 20
BYTES = 512 * 1024 * 4  # of one weight of planned.Net


def total_of(plan: lowtide.planning.Plan, category: str) -> int:
    return plan.by_category.get(category, 0)


@pytest.fixture(scope="module")
def net() -> lowtide.planning.Plan:
    return lowtide.plan(planned.build, planned.step, cublas_workspace=0)


def test_parameters_gradients_and_states(net):
    assert total_of(net, "parameters") == 2 * BYTES
    # Two moments, and no device memory for the step counts of Adam.
    assert total_of(net, "optimizer_state") == 4 * BYTES


def test_activations_are_what_backward_needs(net):
    forward = net.moments["loss"].by_category
    x, hidden = 256 * 512 * 4, 256 * 1024 * 4
    assert forward["inputs"] == x
    # The relu's output, the second layer's for the square, and the loss itself.
    assert forward["activations"] == hidden + x + 512


def test_moments_and_the_peak(net):
    assert list(net.moments) == ["forward", "loss", "backward", "optimizer"]
    worst = max(moment.allocated for moment in net.moments.values())
    assert net.peak_allocated == worst == sum(net.by_category.values())
    assert net.fragmentation == net.peak_reserved - net.peak_allocated >= 0
    assert (net.steps, net.world, net.fits, net.retries) == (3, 1, None, 0)


def test_largest_tensors_carry_the_line_that_made_them(net):
    rows = {(row.name, row.category): row for row in net.largest}
    weight = rows["first.weight", "parameters"]
    assert (weight.bytes, weight.count) == (BYTES, 1)
    assert weight.code == 'model = Net().to("cuda")'
    assert "support/planned.py:" in weight.line and weight.line.endswith(" build")
    state = rows["first.weight exp_avg", "optimizer_state"]
    assert state.code == "optimizer.step()"


def test_a_gradient_is_shown_at_its_forward(net):
    gradients = [row for row in net.largest if row.category == "gradients"]
    assert {row.name for row in gradients} <= {"first.weight", "second.weight"}
    for row in gradients:
        assert row.code == "return self.second(self.first(x).relu())"


def test_timeline_ends_where_the_step_ends(net):
    timeline = net.timeline
    for place, moment in enumerate(timeline.moments):
        total = sum(line[place] for line in timeline.allocated.values())
        assert total <= timeline.reserved[place]
        assert total >= 6 * BYTES, (place, moment)  # parameters and states stay
    assert timeline.moments[-1] == "optimizer"


def test_cublas_workspaces_are_told_from_tensors_of_their_size():
    """Weights and workspaces of 2 MiB: one for each of the two threads."""
    plan = lowtide.plan(planned.build, planned.step, cublas_workspace=BYTES)
    assert plan.moments["backward"].by_category["cublas_workspace"] == 2 * BYTES
    assert total_of(plan, "parameters") == 2 * BYTES


def test_gradients_of_weights_and_of_values_of_one_size():
    plan = lowtide.plan(
        planned.build_squares, planned.step_squares, world=2, cublas_workspace=0
    )
    assert max(plan.timeline.allocated["full_gradients"]) == 3 * 256 * 256 * 4


def test_sharding_divides_what_is_held():
    plan = lowtide.plan(
        planned.build_sharded, planned.step, world=4, rank=3, cublas_workspace=0
    )
    assert total_of(plan, "parameters") == 2 * BYTES // 4
    assert plan.rank == 3
    assert plan.moments["forward"].by_category["gathered_parameters"] == 2 * BYTES


# -- a listener changes nothing ---------------------------------------------------


def train_without_listener(system: str, world: int) -> None:
    from lowtide.planning import cuda, model_file, process_group
    from lowtide.planning.decisions import Decisions

    cuda.set_up(num_devices=world, memory=None, decisions=Decisions(), notes=[])
    process_group.set_up(world=world, rank=0, torchrun=True, notes=[])
    program = ModelFile(planned.LLAMA, "bytes", system, sequence=256)  # type: ignore
    model_file.train_model_file(program, 3, lambda model: None)


def peaks_without_listener(system: str) -> tuple[int, int, int]:
    return planned.peaks_of(train_without_listener, system, 4)


@pytest.mark.parametrize("system", ["lowtide", "fsdp2", "ddp"])
def test_peaks_equal_those_of_a_run_nobody_listens_to(phantom, system):
    # A process of its own: cuda.set_up is for good.
    process = phantom("meta", cublas_workspace=0, allow=(f"only::{system}",))
    allocated, reserved, _ = process.run(peaks_without_listener, system)
    plan = planned.plan_llama(system=system, world=4)
    assert (plan.peak_allocated, plan.peak_reserved) == (allocated, reserved)


@pytest.mark.parametrize("system", ["lowtide", "fsdp2"])
def test_every_category_of_a_sharded_llama(system):
    plan = planned.plan_llama(system=system, world=4)
    found = set(plan.by_category)
    assert {"parameters", "optimizer_state", "gathered_parameters"} <= found
    assert plan.by_category.get("other", 0) == 0
    # Each shard is rounded up to 512 bytes.
    assert 1 <= plan.by_category["parameters"] / num_parameters() < 1.01
    assert (plan.lowtide is not None) == (system == "lowtide")


def num_parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(CONFIGS["bytes"]).parameters())


def test_lowtides_ledger_agrees_with_the_allocator():
    plan = planned.plan_llama(system="lowtide", world=4)
    ledger = plan.lowtide["categories"]
    held = plan.moments["optimizer"].by_category
    assert ledger["parameters"]["live"] == held["parameters"]


def test_checkpointing_turns_activations_into_recomputed_ones():
    kept = planned.plan_llama(checkpoint="none", world=4)
    again = planned.plan_llama(checkpoint="full", world=4)
    some = planned.plan_llama(checkpoint="selective", world=4)

    def at_the_loss(plan: lowtide.planning.Plan) -> int:
        return plan.moments["loss"].by_category["activations"]

    assert at_the_loss(again) < at_the_loss(some) < at_the_loss(kept)
    assert again.peak_allocated < some.peak_allocated < kept.peak_allocated
    assert "recomputed" not in kept.moments["backward"].by_category


def test_microbatches_without_sync_hold_full_gradients():
    plan = planned.plan_llama(microbatches=2, world=4)
    slab = plan.moments["forward"].by_category["full_gradients"]
    assert 1 <= slab / (4 * num_parameters()) < 1.01


# -- the device's size ------------------------------------------------------------


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-2 * MIB, False)])
def test_fits_exactly_into_what_it_reserves(net, spare, fits):
    least = net.peak_allocated
    plan = lowtide.plan(
        planned.build,
        planned.step,
        cublas_workspace=0,
        device_memory=(net.peak_reserved if fits else least) + spare,
    )
    assert plan.fits is fits
    assert plan.peak_reserved == net.peak_reserved  # as on a device without limit


def test_expandable_segments_save_what_was_advised():
    default = planned.plan_script("train_fsdp2.py", world=4)
    expandable = planned.plan_script(
        "train_fsdp2.py", world=4, allocator={"expandable": True}
    )
    (advice,) = [s for s in default.savings if s.what == "expandable_segments"]
    assert advice.reserved == default.peak_reserved - expandable.peak_reserved > 0
    assert advice.basis == "replayed"
    assert not [s for s in expandable.savings if s.what == "expandable_segments"]
