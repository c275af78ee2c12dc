"""AllocatorModel: torch's answers without a device."""

import pickle
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch.cuda import _memory_viz

from lowtide.phantom import AllocatorModel
from lowtide.phantom.snapshots import dump_snapshot, torch_snapshot

MIB = 1 << 20


def test_allocated_and_reserved_follow_malloc_and_free():
    model = AllocatorModel()
    handle = model.malloc(30 * MIB + 1)
    assert (model.allocated, model.reserved) == (30 * MIB + 512, 32 * MIB)
    assert model.size_of(handle) == 30 * MIB + 512
    model.free(handle)
    assert (model.allocated, model.reserved) == (0, 32 * MIB)
    model.empty_cache()
    assert model.reserved == 0


@pytest.mark.parametrize(("events", "reserved"), [("immediate", 100), ("at_sync", 200)])
def test_events_give_both_bounds(events, reserved):
    model = AllocatorModel(events=events)
    handle = model.malloc(100 * MIB, stream=1)
    model.record_stream(handle, 2)
    model.free(handle)
    model.malloc(100 * MIB, stream=1)
    assert model.reserved == reserved * MIB


def test_synchronize_completes_events():
    model = AllocatorModel(events="at_sync")
    for stream in (2, None):
        handle = model.malloc(100 * MIB, stream=1)
        model.record_stream(handle, 2)
        model.free(handle)
        model.synchronize(3)
        model.synchronize(stream)
        assert model.malloc(100 * MIB, stream=1) == handle
        model.free(handle)


def test_full_device_raises_torchs_error():
    model = AllocatorModel(capacity=100 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as error:
        model.malloc(101 * MIB)
    assert str(error.value).startswith(
        "lowtide: phantom device memory: expected room for 101.00 MiB (102.00 MiB "
        "reserved), got 100.00 MiB of which 0 bytes are reserved and 0 bytes allocated."
    )
    assert model.stats()["num_ooms"] == 1


def test_expandable_segments_and_fraction_can_change():
    model = AllocatorModel(capacity=100 * MIB)
    model.set_expandable(True)
    model.malloc(11 * MIB)
    assert model.reserved == 20 * MIB
    model.set_memory_fraction(0.2)
    with pytest.raises(torch.OutOfMemoryError):
        model.malloc(20 * MIB)


def test_one_value_of_roundup_is_for_all_sizes():
    assert (
        AllocatorModel(roundup_power2_divisions=4).settings()[
            "roundup_power2_divisions"
        ]
        == [4] * 16
    )
    model = AllocatorModel(roundup_power2_divisions=[0] * 3 + [2] * 13)
    model.malloc(5 * MIB)
    model.malloc(9 * MIB)
    assert model.allocated == (5 + 12) * MIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"events": "sometimes"},
            'lowtide: allocator events: expected "immediate" or "at_sync", got '
            '"sometimes". Immediate gives the lower bound of what is reserved, at_sync '
            "the upper.",
        ),
        (
            {"max_split": MIB},
            "lowtide: allocator max_split: expected at least large_segment, 20971520 "
            "bytes (20 MiB), got 1048576 bytes (1 MiB). Raise it, or leave it out for "
            "no limit.",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AllocatorModel(**settings)


def test_unknown_handle_is_refused():
    message = (
        "lowtide: allocator: expected the address of a live allocation, got 0xc. Free "
        "what malloc returned, once."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AllocatorModel().free(12)


def test_settings_make_an_equal_model():
    model = AllocatorModel(
        capacity=1000 * MIB,
        max_split=64 * MIB,
        events="at_sync",
        memory_fraction=0.5,
        roundup_power2_divisions=8,
    )
    assert AllocatorModel(**model.settings()).settings() == model.settings()


def test_peaks_and_sums_can_be_reset():
    model = AllocatorModel()
    model.free(model.malloc(30 * MIB))
    assert model.stats()["allocated_bytes.all.peak"] == 30 * MIB
    model.reset_peak_stats()
    model.reset_accumulated_stats()
    stats = model.stats()
    assert stats["allocated_bytes.all.peak"] == 0
    assert stats["allocated_bytes.large_pool.freed"] == 0
    assert stats["reserved_bytes.large_pool.peak"] == 30 * MIB


def test_threads_may_share_a_model():
    model = AllocatorModel()

    def work(stream: int) -> None:
        for _ in range(300):
            handles = [model.malloc(n * 1000, stream) for n in range(20)]
            for handle in handles:
                model.free(handle)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.allocated == 0
    assert model.stats()["allocation.all.allocated"] == 4 * 300 * 19
    assert model.reserved == 4 * 2 * MIB


def example() -> AllocatorModel:
    model = AllocatorModel(capacity=200 * MIB, events="at_sync")
    model.record_history(1000)
    held = [model.malloc(n * MIB, stream=n % 2) for n in (*range(1, 11), 30)]
    model.record_stream(held[2], 5)
    for handle in (*held[1:6], held[-1]):
        model.free(handle)
    with pytest.raises(torch.OutOfMemoryError):
        model.malloc(500 * MIB)
    model.empty_cache()
    return model


def test_snapshot_opens_in_torchs_tools(tmp_path):
    model = example()
    dump_snapshot(model, tmp_path / "snapshot.pickle")
    data = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    # What the web page reads is written by this function.
    assert "alloc" in _memory_viz.trace(data)
    assert f"reserved: {model.reserved / MIB:.1f}MiB" in _memory_viz.segsum(data)
    for page in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert "MemoryViz.js" in page


def test_snapshot_has_only_torchs_actions():
    actions = {
        entry["action"] for entry in torch_snapshot(example())["device_traces"][0]
    }
    assert actions == {
        *("alloc", "free_requested", "free_completed", "oom"),
        *("segment_alloc", "segment_free"),
    }


def test_import_of_lowtide_does_not_load_the_simulator():
    code = "import sys, lowtide; print([m for m in sys.modules if 'phantom' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
