"""FSDP2's head under a loss in chunks, as the benchmarks have it: gathered once a step,
however many the chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import ENVIRONMENT, PROGRAMS
from llama_memory import NUM_STEPS

from lowtide.phantom.dry import launch
from support.dry_process import run_dry

pytestmark = pytest.mark.slow

BLOCKS, WORLD = 2, 8
SHAPE = ("--num-layers", str(BLOCKS), "--vocab-size", "4096", "--sequence", "1024")


def gathers(loss: str, microbatches: int, report: Path) -> int:
    """Of all steps, as NCCL was asked for them."""
    machine = launch.Machine(world=WORLD)
    options = ("--system", "fsdp2", "--loss", loss, "--microbatches", str(microbatches))
    program = (str(PROGRAMS / "llama_memory.py"), "--world", str(WORLD))
    run_dry(
        *(*program, *SHAPE, *options),
        machine=machine,
        report=report,
        environment=ENVIRONMENT,
    )
    calls = json.loads(report.read_text())["calls"]
    return sum(call["kind"] == "all_gather" for call in calls)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_head_is_gathered_once_a_backward(
    microbatches: int, tmp_path: Path
) -> None:
    # A block twice, the embedding twice, the norm and the head once.
    a_step = microbatches * (2 * BLOCKS + 2 + 2)
    for chunks in (2, 16):
        seen = gathers(f"chunked:{chunks}", microbatches, tmp_path / "report.json")
        assert seen == NUM_STEPS * a_step
