"""A lower layer never includes a higher one, and some rooms never meet.

Reads the `#include "..."` lines of csrc and the import lines of python/lowtide.
Add a new room or module to the table of its language.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Rooms of equal height do not include each other.
CPP_LAYERS = {
    "base": 0,
    "device": 1,
    "memory": 2,
    "comm": 2,
    "shard": 3,
    "activation": 3,
    "gather": 3,
    "spmd": 3,
    "ops": 4,
    "python": 5,
}


def cpp_violations(csrc: Path) -> list[str]:
    return [
        f"{source.relative_to(csrc)}:{line} includes {included}"
        for source in sorted(csrc.rglob("*"))
        if source.suffix in {".h", ".cpp", ".cu", ".cuh"}
        for line, included in quoted_includes(source)
        if not may_include(
            source.relative_to(csrc).parts[0], included.split("/")[0], CPP_LAYERS
        )
    ]


def quoted_includes(source: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.read_text().splitlines(), start=1):
        if match := re.match(r'\s*#\s*include\s+"(.+)"', line):
            yield number, match[1]


def may_include(room: str, other: str, layers: dict[str, int]) -> bool:
    return room == other or layers.get(other, 99) < layers.get(room, -1)


def test_cpp_layers():
    assert cpp_violations(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("file", "included", "allowed"),
    [
        ("memory/slab.cpp", "device/runtime.h", True),
        ("memory/slab.cpp", "memory/slab.h", True),
        ("shard/unit.h", "comm/collectives.h", True),
        ("python/module.cpp", "ops/schemas.h", True),
        ("device/cuda/runtime.cu", "memory/ledger.h", False),  # upward
        ("memory/slab.cpp", "comm/collectives.h", False),  # sideways
        ("shard/unit.h", "activation/frame.h", False),  # sideways
        ("shard/unit.h", "python/bind.h", False),
        ("shard/unit.h", "unit_state.h", False),  # not relative to csrc
        ("toys/x.h", "base/check.h", False),  # a room nobody entered above
    ],
)
def test_cpp_rule(tmp_path, file, included, allowed):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f'// text\n#include <vector>\n#include "{included}"\n')
    found = [] if allowed else [f"{file}:3 includes {included}"]
    assert cpp_violations(tmp_path) == found
