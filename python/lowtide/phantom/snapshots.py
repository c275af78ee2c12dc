"""The model's memory for PyTorch's tools: https://pytorch.org/memory_viz and
``torch.cuda._memory_viz`` open what :func:`dump_snapshot` writes."""

import pickle
from pathlib import Path
from typing import Any

from lowtide.phantom.allocator import AllocatorModel

# The history's entries that torch does not know.
_OWN_ACTIONS = {
    "record_stream",
    "synchronize_stream",
    "synchronize_device",
    "empty_cache",
}


def torch_snapshot(model: AllocatorModel) -> dict[str, Any]:
    """``torch.cuda.memory._snapshot()`` of the model: its segments now, and its history
    if that is recorded. The model has no clock: entries are a microsecond apart. Call
    stacks are empty."""
    settings = model.settings()
    divisions = settings["roundup_power2_divisions"]
    entries = _entries(model)  # before the snapshot makes one
    return {
        "segments": model.snapshot(),
        "device_traces": [entries],
        "external_annotations": [],
        "allocator_settings": {
            "expandable_segments": settings["expandable"],
            "garbage_collection_threshold": settings["garbage_collection_threshold"],
            "max_split_size": settings["max_split"] or -1,
            "roundup_power2_divisions": {
                str(1 << place): count for place, count in enumerate(divisions)
            },
        },
    }


def dump_snapshot(model: AllocatorModel, path: str | Path) -> None:
    """Pickles :func:`torch_snapshot`, as ``torch.cuda.memory._dump_snapshot`` does."""
    with open(path, "wb") as file:
        pickle.dump(torch_snapshot(model), file)


def _entries(model: AllocatorModel) -> list[dict[str, Any]]:
    result = []
    for time, (action, address, size, stream) in enumerate(model.history()):
        if action not in _OWN_ACTIONS:
            where = "device_free" if action == "oom" else "addr"
            result.append(
                {
                    "action": action,
                    where: address,
                    "size": size,
                    "stream": stream,
                    "time_us": time,
                    "compile_context": "N/A",
                    "user_metadata": "",
                    "frames": [],
                }
            )
    return result
