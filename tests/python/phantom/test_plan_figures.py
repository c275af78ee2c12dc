"""What `lowtide plan` reports is what the program holds, by arithmetic over its
shapes."""

from __future__ import annotations

import pytest

import lowtide
from lowtide.planning import Plan
from support import planned, workspaces

MIB = 1 << 20
BYTES = 512 * 1024 * 4  # of one weight of planned.Net


@pytest.fixture(scope="module")
def net() -> Plan:
    return planned.plan_net(planned.build)


def test_parameters_gradients_and_states(net):
    assert net.by_category["parameters"] == 2 * BYTES
    # Two moments, and no device memory for the step counts of Adam.
    assert net.by_category["optimizer_state"] == 4 * BYTES
    assert net.by_category["gradients"] == 2 * BYTES


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
    assert (net.steps, net.world, net.fits, net.retries) == (3, 1, True, 0)


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
    assert {row.name for row in gradients} == {"first.weight", "second.weight"}
    for row in gradients:
        assert row.code == "return self.second(self.first(x).relu())"


def test_timeline_ends_where_the_step_ends(net):
    timeline = net.timeline
    for place, moment in enumerate(timeline.moments):
        total = sum(line[place] for line in timeline.allocated.values())
        assert total <= timeline.reserved[place]
        assert total >= 6 * BYTES, (place, moment)  # parameters and states stay
    assert timeline.moments[-1] == "optimizer"


def test_workspaces_are_told_from_tensors(net):
    """32 MiB of cuBLAS for each of the two threads, and what cuBLASLt takes."""
    plan = lowtide.plan(planned.build, planned.step)
    if not workspaces.KEPT:  # they are temporaries of a product
        assert "cublas_workspace" not in plan.by_category
        return
    more = plan.by_category.pop("cublas_workspace")
    assert plan.by_category == net.by_category
    assert more == plan.peak_allocated - net.peak_allocated
    assert 64 * MIB <= more <= 66 * MIB


def test_gradients_of_weights_and_of_values_of_one_size():
    plan = planned.plan_net(planned.build_squares, world=2)
    assert max(plan.timeline.allocated["full_gradients"]) == 3 * 512 * 512 * 4


def test_sharding_divides_what_is_held():
    plan = planned.plan_net(planned.build_sharded, world=4, rank=3)
    assert plan.by_category["parameters"] == 2 * BYTES // 4
    assert plan.rank == 3
    assert plan.moments["forward"].by_category["gathered_parameters"] == 2 * BYTES


def test_a_fused_optimizer_as_advised(net):
    fused = planned.plan_net(planned.build_fused)
    assert net.peak_moment == "optimizer"
    (advised,) = [s for s in net.savings if s.what == "fused_optimizer"]
    assert advised.advice == "the optimizer's fused=True"
    # fused keeps a step count of each weight on the device, 512 bytes.
    less = net.peak_allocated - fused.peak_allocated
    assert advised.allocated == less + 2 * 512
