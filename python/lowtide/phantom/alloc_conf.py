"""``PYTORCH_ALLOC_CONF`` read as torch 2.11 reads it."""

import os
import re
from typing import Any

# Known to torch, without effect on what is reserved on the device.
_IGNORED = {
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_use_background_threads",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "graph_capture_record_stream_reuse",
}
_SIZES = {
    "max_split_size_mb": "max_split",
    "large_segment_size_mb": "large_segment",
    "max_non_split_rounding_mb": "max_non_split_rounding",
}
_FRACTIONS = {
    "garbage_collection_threshold": "garbage_collection_threshold",
    "per_process_memory_fraction": "memory_fraction",
}


def environment() -> str:
    """What torch's CUDA would read, "" for nothing."""
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return os.environ.get("PYTORCH_ALLOC_CONF", "") if conf is None else conf


def parse(conf: str) -> dict[str, Any]:
    """Keywords for :class:`~lowtide.phantom.AllocatorModel`; only what ``conf`` sets.

    Raises ValueError for a key or value that torch does not know, and for
    ``backend:cudaMallocAsync``, which is another allocator.
    """
    keywords: dict[str, Any] = {}
    for key, value in _items(conf):
        if key in _SIZES:
            keywords[_SIZES[key]] = int(_number(key, value, "128")) << 20
        elif key in _FRACTIONS:
            keywords[_FRACTIONS[key]] = _number(key, value, "0.8")
        elif key == "expandable_segments":
            keywords["expandable"] = _boolean(key, value)
        elif key == "roundup_power2_divisions":
            keywords[key] = _divisions(key, value)
        elif key not in _IGNORED and (key, value) != ("backend", "native"):
            raise ValueError(
                "lowtide: PYTORCH_ALLOC_CONF: expected settings of the native "
                f"allocator, got {key}:{value!s}. Remove it for this simulation."
            )
    return keywords


def text_of(keywords: dict[str, Any]) -> str:
    """The inverse of :func:`parse`; other keywords are left out."""
    parts = [
        *(f"{k}:{keywords[v] >> 20}" for k, v in _SIZES.items() if v in keywords),
        *(f"{k}:{keywords[v]}" for k, v in _FRACTIONS.items() if v in keywords),
    ]
    if "expandable" in keywords:
        parts.append(f"expandable_segments:{keywords['expandable']}")
    if divisions := keywords.get("roundup_power2_divisions"):
        sizes = ",".join(f"{1 << i}:{n}" for i, n in enumerate(divisions))
        parts.append(f"roundup_power2_divisions:[{sizes}]")
    return ",".join(parts)


def _items(conf: str) -> list[tuple[str, str]]:
    """``a:1,b:[2:3,>:4]`` -> [("a", "1"), ("b", "[2:3,>:4]")]."""
    text = "".join(conf.split())
    pair = re.compile(r"([^:,\[\]]+):(\[[^\]]*\]|[^:,\[\]]+)(?:,|$)")
    found = list(pair.finditer(text))
    if sum(len(match[0]) for match in found) != len(text):
        raise ValueError(
            "lowtide: PYTORCH_ALLOC_CONF: expected key:value pairs between commas, "
            f"got {conf!r}. Write, for example, expandable_segments:True."
        )
    return [(match[1], match[2]) for match in found]


def _boolean(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(
            f"lowtide: PYTORCH_ALLOC_CONF: expected True or False for {key}, "
            f"got {value!r}. Use one of the two."
        )
    return value == "True"


def _number(key: str, value: str, example: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"lowtide: PYTORCH_ALLOC_CONF: expected a number for {key}, got {value!r}. "
            f"Write, for example, {key}:{example}."
        ) from None


def _divisions(key: str, value: str) -> list[int]:
    """Sixteen values, for requests from 1, 2, 4, ... 32768 MiB on. Sizes below the
    first one named get its value; between two that are named stays 0."""

    def number(text: str) -> int:
        return int(_number(key, text, "[256:1,>:4]"))

    if not value.startswith("["):
        return [number(value)] * 16
    divisions = [0] * 16
    last = 0
    for place, entry in enumerate(value[1:-1].split(",")):
        size, _, count = entry.partition(":")
        if size == ">":
            divisions[last + 1 :] = [number(count)] * (15 - last)
            continue
        last = min(number(size).bit_length() - 1, 15)
        if place == 0:
            divisions[:last] = [number(count)] * last
        divisions[last] = number(count)
    return divisions
