"""Trace files, and what is deduced from the history of a CUDA run."""

import json
import re

import pytest
import torch

from lowtide.phantom import AllocatorModel
from lowtide.phantom.histories import trace_of_cuda, trace_of_model
from lowtide.phantom.snapshots import torch_snapshot
from lowtide.phantom.traces import Operation, Trace, replay, reserved_bounds
from support.allocation_traces import random_trace

MIB = 1 << 20


def test_file_is_the_documented_format(tmp_path):
    trace = Trace(
        [
            Operation("allocate", 0, 4096, 0, reserved=2 * MIB),
            Operation("record", 0, stream=3),
            Operation("free", 0),
            Operation("synchronize", stream=3),
            Operation("synchronize"),
            Operation("empty_cache", reserved=0),
            Operation("allocate", bytes=7, stream=1, fails=True),
        ],
        {"expandable": True},
    )
    trace.write(tmp_path / "trace.jsonl")
    assert (tmp_path / "trace.jsonl").read_text().splitlines() == [
        '{"trace":"lowtide.phantom.allocator","version":1,'
        '"settings":{"expandable":true}}',
        '{"op":"allocate","id":0,"bytes":4096,"stream":0,"reserved":2097152}',
        '{"op":"record","id":0,"stream":3}',
        '{"op":"free","id":0}',
        '{"op":"synchronize","stream":3}',
        '{"op":"synchronize"}',
        '{"op":"empty_cache","reserved":0}',
        '{"op":"allocate","bytes":7,"stream":1,"fails":true}',
    ]
    assert Trace.read(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize("first", ["", "hello", "[1]", '{"trace":"x","version":1}'])
def test_other_files_are_refused(tmp_path, first):
    path = tmp_path / "file.jsonl"
    path.write_text(first)
    header = json.dumps({"trace": "lowtide.phantom.allocator", "version": 1})
    message = (
        f"lowtide: {path}: expected a line with {header}, got {first!r}. Write the "
        "file with lowtide.phantom.traces."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trace.read(path)


def test_replay_reports_bytes_and_differences():
    trace = Trace(
        [
            Operation("allocate", 0, 30 * MIB, 0, reserved=30 * MIB),
            Operation("allocate", 1, 5 * MIB, 0, reserved=51 * MIB),
            Operation("free", 0),
        ]
    )
    result = replay(trace)
    assert result.allocated == [30 * MIB, 35 * MIB, 5 * MIB]
    assert result.reserved == [30 * MIB, 50 * MIB, 50 * MIB]
    (difference,) = result.differences
    assert (difference.index, difference.reserved) == (1, 50 * MIB)
    assert difference.operation.reserved == 51 * MIB


def test_replay_takes_another_model():
    trace = Trace([Operation("allocate", 0, 3 * MIB, 0)], {"expandable": False})
    model = AllocatorModel(large_segment=32 * MIB)
    assert replay(trace, model).reserved == [32 * MIB]
    assert model.allocated == 3 * MIB


def test_bounds_of_reserved_memory():
    trace = Trace(
        [
            Operation("allocate", 0, 100 * MIB, 1),
            Operation("record", 0, stream=2),
            Operation("free", 0),
            Operation("allocate", 1, 100 * MIB, 1),
        ]
    )
    assert reserved_bounds(trace) == (100 * MIB, 200 * MIB)
    assert reserved_bounds(Trace([])) == (0, 0)
    full = Trace(trace.operations, {"capacity": 150 * MIB})
    assert reserved_bounds(full) == (100 * MIB, 100 * MIB)


def test_failed_allocation_is_tried_where_there_is_a_capacity():
    operations = [
        Operation("allocate", 0, 60 * MIB, 0),
        Operation("free", 0),
        Operation("allocate", bytes=90 * MIB, stream=0, fails=True),
    ]
    assert replay(Trace(operations)).reserved[-1] == 60 * MIB
    assert replay(Trace(operations, {"capacity": 80 * MIB})).reserved[-1] == 0
    assert replay(Trace(operations, {"capacity": 95 * MIB})).reserved[-1] == 90 * MIB


def recorded(trace: Trace) -> AllocatorModel:
    """``trace`` on a model with a history; what does not fit is not freed."""
    model = AllocatorModel(**trace.settings)
    model.record_history(10**6)
    handles: dict[int | None, int] = {}
    for operation in trace.operations:
        if operation.op == "allocate":
            try:
                handles[operation.id] = model.malloc(operation.bytes, operation.stream)
            except torch.OutOfMemoryError:
                pass
        elif operation.op == "free":
            model.free(handles.pop(operation.id, 0))
        elif operation.op == "record":
            model.record_stream(handles.get(operation.id, 0), operation.stream)
        elif operation.op == "synchronize":
            model.synchronize(operation.stream)
        else:
            model.empty_cache()
    return model


SETTINGS = [
    {"events": "immediate"},
    {"events": "at_sync"},
    {"events": "at_sync", "expandable": True},
    {"events": "at_sync", "capacity": 800 * MIB},
    {"events": "at_sync", "capacity": 800 * MIB, "expandable": True},
    {"events": "at_sync", "capacity": 900 * MIB, "max_split": 48 * MIB},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_written_trace_replays_to_the_same_state(tmp_path, settings):
    model = recorded(random_trace(3, 2000, **settings))
    trace_of_model(model).write(tmp_path / "trace.jsonl")
    again = Trace.read(tmp_path / "trace.jsonl")
    assert sum(o.fails for o in again.operations) == model.stats()["num_ooms"]
    result = replay(again)
    assert result.differences == []
    assert len(result.reserved) > 1500
    assert result.model.snapshot() == model.snapshot()


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_cuda_history_replays_without_what_torch_does_not_log(settings):
    """The model's own history stands for torch's: it was compared with it entry by
    entry, and holds neither record_stream nor synchronize nor empty_cache here."""
    model = recorded(random_trace(5, 2000, **settings))
    snapshot = torch_snapshot(model)
    conf = f"expandable_segments:{bool(settings.get('expandable'))}"
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = conf
    trace = trace_of_cuda(snapshot)
    result = replay(trace)
    assert result.differences == []
    assert {o.op for o in trace.operations} >= {"allocate", "free", "empty_cache"}
    stats, expected = result.model.stats(), model.stats()
    for key in ("reserved_bytes.all.peak", "allocated_bytes.all.peak"):
        assert stats[key] == expected[key]
    assert stats["active_bytes.all.current"] == expected["active_bytes.all.current"]


@pytest.mark.parametrize("expandable", [False, True])
def test_cuda_history_of_a_full_device(expandable):
    settings = {"events": "at_sync", "capacity": 800 * MIB, "expandable": expandable}
    model = recorded(random_trace(6, 2000, **settings))
    assert model.stats()["num_alloc_retries"] > model.stats()["num_ooms"] > 10
    snapshot = torch_snapshot(model)
    conf = f"expandable_segments:{expandable}"
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = conf
    trace = trace_of_cuda(snapshot)
    assert trace.settings["capacity"] == 800 * MIB  # found in the first failure
    assert replay(trace).differences == []


def test_history_that_begins_late_is_refused():
    model = AllocatorModel()
    handle = model.malloc(1)
    model.record_history(100)
    model.free(handle)
    message = (
        f"lowtide: history: expected the allocation at {handle:#x} before its free, "
        "got a history that begins later. Record from before the first allocation, "
        "with enough entries."
    )
    for convert in (trace_of_model, lambda m: trace_of_cuda(torch_snapshot(m))):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            convert(model)
