"""FSDP2's head under a loss in chunks, as the benchmarks have it: gathered once a step,
however many the chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch import run

BLOCKS, WORLD = 2, 8


def step(system: str, loss: str, microbatches: int = 1) -> dict[str, Any]:
    shape = ("--num-layers", str(BLOCKS), "--vocab-size", "4096", "--sequence", "1024")
    options = ("--system", system, "--loss", loss, "--microbatches", str(microbatches))
    printed = run("llama_time.py", *shape, *options, timeout=300)
    figures: dict[str, Any] = json.loads(printed)
    return figures


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_head_is_gathered_once_a_backward(microbatches: int) -> None:
    # A block twice, the embedding twice, the norm and the head once.
    gathers = microbatches * (2 * BLOCKS + 2 + 2)
    for chunks in (2, 16):
        figures = step("fsdp2", f"chunked:{chunks}", microbatches)
        assert figures["collectives"]["all-gather"] == gathers
