"""The model against torch's own CUDACachingAllocator, call by call.

libc10_cuda.so of the installed torch runs over the dry driver
(csrc/phantom/driver), so no GPU is needed. The driver pretends one device of fixed size
whose addresses are handed out lowest first, with events that complete at once or only
when the host waits, and a cudaFree that waits for the device. It decides nothing that
the allocator decides: which block, which segment, when to flush.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

import pytest
import torch

from lowtide.phantom import AllocatorModel, alloc_conf
from lowtide.phantom.histories import trace_of_cuda
from lowtide.phantom.snapshots import torch_snapshot
from lowtide.phantom.traces import Operation, Trace, replay
from support.allocation_traces import random_trace
from support.torch_allocator import Played, checkpoints, play_on_torch

AMPLE = 64 << 30
TIGHT = 1 << 30  # the random programs want about 2 GiB


CASES = [
    pytest.param(
        conf, memory, events, id=f"{conf or 'default'}-{memory >> 30}GiB-{events}"
    )
    for conf, memory, events in [
        ("", AMPLE, "immediate"),
        ("", AMPLE, "at_sync"),
        ("", TIGHT, "at_sync"),
        ("expandable_segments:True", AMPLE, "at_sync"),
        ("expandable_segments:True", TIGHT, "at_sync"),
        ("max_split_size_mb:32", TIGHT, "at_sync"),
        ("max_split_size_mb:40,max_non_split_rounding_mb:64", AMPLE, "immediate"),
        ("roundup_power2_divisions:[1:2,4:8,32:4,>:1]", AMPLE, "immediate"),
        (
            "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
            TIGHT,
            "at_sync",
        ),
        (
            "expandable_segments:True,per_process_memory_fraction:0.7,"
            "large_segment_size_mb:32,max_split_size_mb:64",
            TIGHT,
            "immediate",
        ),
    ]
]


@pytest.mark.parametrize(("conf", "memory", "events"), CASES)
def test_model_does_what_torch_does(tmp_path, conf, memory, events):
    ample = memory == AMPLE
    trace = random_trace(len(conf), 3000, empty_cache=ample, events=events)
    torch_says = play_on_torch(trace, tmp_path, conf=conf, memory=memory)
    model = AllocatorModel(events=events, capacity=memory, **alloc_conf.parse(conf))
    compare(trace, torch_says, model)
    assert bool(torch_says.errors) is not ample
    reported = torch_says.snapshot["allocator_settings"]
    own = torch_snapshot(model)["allocator_settings"]
    assert own == {key: reported[key] for key in own}

    # The history alone says what the program asked for.
    from_history = trace_of_cuda(torch_says.snapshot, capacity=memory)
    assert replay(from_history).differences == []


def test_expandable_segments_switched_on_and_off(tmp_path):
    trace = random_trace(1, 3000, events="at_sync")
    toggles = {500: True, 1000: False, 1200: True, 2500: False}
    torch_says = play_on_torch(trace, tmp_path, memory=TIGHT, toggles=toggles)
    model = AllocatorModel(events="at_sync", capacity=TIGHT)
    compare(trace, torch_says, model, toggles)


def compare(
    trace: Trace,
    expected: Played,
    model: AllocatorModel,
    toggles: Mapping[int, bool] | None = None,
) -> None:
    model.record_history(10**6)
    handles: dict[int | None, int] = {}
    looks = dict(
        zip(
            checkpoints(trace),
            zip(expected.stats, expected.segments, strict=True),
            strict=True,
        )
    )
    for index, operation in enumerate(trace.operations):
        if toggles and index in toggles:
            model.set_expandable(toggles[index])
        where = f"operation {index}: {operation}"
        assert apply(operation, model, handles) == expected.addresses[index], where
        assert model.reserved == expected.reserved[index], where
        assert model.allocated == expected.allocated[index], where
        if index in looks:
            stats, segments = looks[index]
            assert comparable(model.stats(), trace) == comparable(stats, trace), where
            assert model.snapshot() == segments, where
    entries = [
        (entry["action"], entry.get("addr", entry.get("device_free")), entry["size"])
        for entry in expected.snapshot["device_traces"][0]
    ]
    assert shared_entries(model) == in_any_order_of_completion(entries)


def comparable(stats: Mapping[str, int], trace: Trace) -> dict[str, int]:
    """torch visits its streams in the order of a hash table. Blocks that several
    streams held up may so become free in another order, and the ways there that
    inactive_split counts differ; what is there in the end does not."""
    if trace.settings["events"] == "immediate":
        return dict(stats)
    by_order = re.compile(r"inactive_split(_bytes)?\.\w+\.(peak|allocated|freed)")
    return {key: value for key, value in stats.items() if not by_order.match(key)}


def apply(
    operation: Operation, model: AllocatorModel, handles: dict[int | None, int]
) -> int | None:
    """As the program that torch ran: what was not allocated is not freed."""
    if operation.op == "allocate":
        try:
            handles[operation.id] = model.malloc(operation.bytes, operation.stream)
        except torch.OutOfMemoryError:
            return None
        return handles[operation.id]
    if operation.op == "free":
        model.free(handles.pop(operation.id, 0))
    elif operation.op == "record":
        model.record_stream(handles.get(operation.id, 0), operation.stream)
    elif operation.op == "synchronize":
        model.synchronize(operation.stream)
    else:
        model.empty_cache()
    return None


def shared_entries(model: AllocatorModel) -> list[tuple[str, int, int]]:
    own = {"record_stream", "synchronize_stream", "synchronize_device", "empty_cache"}
    entries = [entry[:3] for entry in model.history() if entry[0] not in own]
    return in_any_order_of_completion(entries)


def in_any_order_of_completion(entries: Iterable[tuple]) -> list[tuple]:
    """See :func:`comparable`; ``snapshot`` entries are those of this test."""
    result: list[tuple] = []
    kept = (entry for entry in entries if entry[0] != "snapshot")
    for action, group in itertools.groupby(kept, key=lambda entry: entry[0]):
        run = list(group)
        result += sorted(run) if action == "free_completed" else run
    return result
