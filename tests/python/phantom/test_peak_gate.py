"""Peak allocated bytes of a Llama step at fixed shapes, to the byte: a change that
costs memory, or saves some, shows here. Two blocks of the 8B width, 1024 tokens, 8
ranks; the vocabulary is just large enough for an embedding in blocks of rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support import planned

PROGRAM = planned.ROOT / "benchmarks/programs/llama_memory.py"
SHAPES = (
    *("--num-layers", "2", "--vocab-size", "16384"),
    *("--sequence", "1024", "--world", "8"),
)
# system, loss -> bytes in the steady step: forward, backward, optimizer
ALLOCATED = {
    ("lowtide", "chunked:4"): (1_963_586_560, 2_555_280_384, 1_208_575_488),
    ("lowtide", "vocabulary"): (1_963_736_064, 2_555_407_360, 1_208_724_992),
    ("fsdp2", "chunked:4"): (2_248_809_984, 2_995_653_632, 1_208_557_056),
}


@pytest.mark.parametrize(("system", "loss"), ALLOCATED)
def test_peak_allocated(system: str, loss: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--system", system, "--loss", loss, *SHAPES],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    moments = json.loads(done.stdout)["steady"]["moments"]
    seen = tuple(moments[m]["allocated"] for m in ("forward", "backward", "optimizer"))
    assert seen == ALLOCATED[system, loss]
