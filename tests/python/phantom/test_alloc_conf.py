"""PYTORCH_ALLOC_CONF as torch reads it."""

import re

import pytest

from lowtide.phantom import AllocatorModel, alloc_conf

MIB = 1 << 20


def test_settings_become_keywords_in_bytes():
    conf = (
        "expandable_segments:True, max_split_size_mb:64,large_segment_size_mb:32,"
        "max_non_split_rounding_mb:40,garbage_collection_threshold:0.8,"
        "per_process_memory_fraction:0.5,roundup_power2_divisions:4"
    )
    assert alloc_conf.parse(conf) == {
        "expandable": True,
        "max_split": 64 * MIB,
        "large_segment": 32 * MIB,
        "max_non_split_rounding": 40 * MIB,
        "garbage_collection_threshold": 0.8,
        "memory_fraction": 0.5,
        "roundup_power2_divisions": [4] * 16,
    }
    AllocatorModel(capacity=1 << 30, **alloc_conf.parse(conf))


@pytest.mark.parametrize(
    ("value", "divisions"),
    [
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),
        ("[64:8,256:4,>:1]", [8] * 7 + [0, 4] + [1] * 7),
        ("[64:8,256:4]", [8] * 7 + [0, 4] + [0] * 7),
        ("[>:4]", [0] + [4] * 15),
        ("[131072:2]", [2] * 16),
    ],
)
def test_roundup_divisions_per_size(value, divisions):
    """The figures are those torch 2.11 reports for the same strings."""
    conf = f"roundup_power2_divisions:{value}"
    assert alloc_conf.parse(conf) == {"roundup_power2_divisions": divisions}


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "backend:native",
        "pinned_use_background_threads:True,pinned_num_register_threads:8",
        "release_lock_on_cudamalloc:True",
    ],
)
def test_what_does_not_change_reserved_memory_is_accepted(conf):
    assert alloc_conf.parse(conf) == {}


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (
            "backend:cudaMallocAsync",
            "lowtide: PYTORCH_ALLOC_CONF: expected settings of the native allocator, "
            "got backend:cudaMallocAsync. Remove it for this simulation.",
        ),
        (
            "max_split_mb:3",
            "lowtide: PYTORCH_ALLOC_CONF: expected settings of the native allocator, "
            "got max_split_mb:3. Remove it for this simulation.",
        ),
        (
            "expandable_segments:true",
            "lowtide: PYTORCH_ALLOC_CONF: expected True or False for "
            "expandable_segments, got 'true'. Use one of the two.",
        ),
        (
            "max_split_size_mb:many",
            "lowtide: PYTORCH_ALLOC_CONF: expected a number for max_split_size_mb, got "
            "'many'. Write, for example, max_split_size_mb:128.",
        ),
        (
            "garbage_collection_threshold:x",
            "lowtide: PYTORCH_ALLOC_CONF: expected a number for "
            "garbage_collection_threshold, got 'x'. Write, for example, "
            "garbage_collection_threshold:0.8.",
        ),
        (
            "roundup_power2_divisions:[4:2,8]",
            "lowtide: PYTORCH_ALLOC_CONF: expected a number for "
            "roundup_power2_divisions, got ''. Write, for example, "
            "roundup_power2_divisions:[256:1,>:4].",
        ),
        (
            "expandable_segments",
            "lowtide: PYTORCH_ALLOC_CONF: expected key:value pairs between commas, got "
            "'expandable_segments'. Write, for example, expandable_segments:True.",
        ),
    ],
)
def test_other_settings_are_refused(conf, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        alloc_conf.parse(conf)
