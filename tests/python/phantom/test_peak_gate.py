"""Peak allocated bytes of a Llama step at fixed shapes, to the byte: a change that
costs memory, or saves some, shows here. Two blocks of the 8B width, 1024 tokens, 8
ranks; the vocabulary is just large enough for an embedding in blocks of rows."""

from __future__ import annotations

import json

import pytest
from launch import run

from lowtide._torch_version import VERSION
from lowtide.phantom.dry.launch import Machine

WORLD = 8
SHAPES = (
    *("--num-layers", "2", "--vocab-size", "16384"),
    *("--sequence", "1024", "--world", str(WORLD)),
)
# system, loss -> bytes in the steady step: forward, backward, optimizer
ALLOCATED = {
    ("lowtide", "chunked:4"): (1_963_571_200, 2_735_598_592, 1_208_560_128),
    ("lowtide", "vocabulary"): (1_963_568_128, 2_735_595_520, 1_208_557_056),
    ("fsdp2", "chunked:4"): (2_248_809_984, 2_995_654_144, 1_208_557_056),
}
if VERSION >= (2, 15):  # whose products keep no workspaces
    ALLOCATED = {
        ("lowtide", "chunked:4"): (1_900_653_568, 2_701_777_408, 1_141_442_560),
        ("lowtide", "vocabulary"): (1_900_653_568, 2_701_777_408, 1_141_442_560),
        ("fsdp2", "chunked:4"): (1_854_497_792, 2_961_836_032, 1_141_442_560),
    }


@pytest.mark.parametrize(("system", "loss"), ALLOCATED)
def test_peak_allocated(system: str, loss: str) -> None:
    options = ("--system", system, "--loss", loss, *SHAPES)
    printed = run(
        "llama_memory.py", *options, machine=Machine(world=WORLD), timeout=300
    )
    moments = json.loads(printed)["steady"]["moments"]
    seen = tuple(moments[m]["allocated"] for m in ("forward", "backward", "optimizer"))
    assert seen == ALLOCATED[system, loss]
