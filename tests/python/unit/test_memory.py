"""The ledger and the timeline as Python sees them; csrc/memory tests the rest."""

import pytest
import torch

from lowtide import _C, memory
from lowtide.planning import categories

CATEGORIES = [
    "parameters",
    "gathered",
    "gather_input",
    "gradient_stream",
    "gradient_slab",
    "sharded_gradients",
    "activations",
]
CPU = torch.device("cpu")


def test_every_category_is_described_and_has_a_place_in_plans():
    assert list(memory.CATEGORIES) == CATEGORIES
    places = {category.in_plans for category in memory.CATEGORIES.values()}
    assert places <= set(categories.CATEGORIES)


def test_a_new_ledger_is_empty():
    ledger = _C.Ledger()
    nothing = dict.fromkeys(CATEGORIES, 0)
    assert ledger.live() == ledger.peak() == ledger.at_total_peak() == nothing
    assert list(ledger.live()) == CATEGORIES
    assert ledger.total_live == ledger.total_peak == 0
    assert ledger.num_leases("gathered") == 0
    assert ledger.by_name("gathered") == {}
    ledger.reset_peaks()


def test_an_unknown_category_lists_the_known_ones():
    with pytest.raises(ValueError, match="one of parameters, gathered") as error:
        _C.Ledger().by_name("residuals")
    assert "got 'residuals'" in str(error.value)


def test_a_timeline_sees_forward_and_backward():
    weight = torch.ones(64, 64, requires_grad=True)
    with _C.AllocationTimeline(CPU, _C.Ledger()) as timeline:
        loss = (weight * weight).sum()
        loss.backward()
    samples = timeline.samples()
    assert list(samples) == ["event", "nanoseconds", "total", "other", *CATEGORIES]
    assert {len(column) for column in samples.values()} == {len(samples["event"])}
    # Saved product's gradient, the product's own and the sum's are temporaries;
    # the weight's gradient stays.
    peak = timeline.peak()
    assert peak["total"] == max(samples["total"]) >= 2 * weight.nbytes
    assert weight.grad is not None
    assert samples["total"][-1] >= weight.grad.nbytes
    assert peak["other"] == peak["total"]


def test_a_timeline_in_a_second_with_block_begins_anew():
    timeline = _C.AllocationTimeline(CPU, capacity=8)
    with timeline:
        kept = torch.empty(1000)
    with timeline:
        pass
    assert timeline.samples()["total"] == [0]
    assert kept.numel() == 1000


def test_a_timeline_refuses_to_start_inside_torchs_profiler():
    timeline = _C.AllocationTimeline(CPU)
    with torch.profiler.profile(profile_memory=True):
        with pytest.raises(RuntimeError, match="an active torch profiler") as error:
            timeline.start()
    assert str(error.value) == (
        "lowtide: allocation timeline: expected no other memory profiler on this "
        "thread, got an active torch profiler. Stop that one first."
    )
