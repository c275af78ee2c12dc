"""A model that waits on the host holds nothing of the GPU, and is back when it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts/sleep_and_wake.py"


def execute(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "lowtide", "phantom", "--world", "2", "--"),
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )


def figures(done: subprocess.CompletedProcess[str]) -> list[tuple[str, int]]:
    assert done.returncode == 0, done.stderr
    return [(what, int(n)) for what, n in map(str.split, done.stdout.splitlines())]


@pytest.mark.slow
def test_it_holds_what_fsdp2_holds_asleep():
    theirs = figures(execute(str(SCRIPT)))
    ours = figures(execute("-m", "lowtide", "run", str(SCRIPT)))
    names = ["trained", "asleep", "awake"]
    assert [what for what, _ in ours] == [*names, *names, "inferred"]
    asleep = {held for what, held in ours if what == "asleep"}
    assert asleep == {held for what, held in theirs if what == "asleep"}
    fused = figures(execute("-m", "lowtide", "run", str(SCRIPT), "fused"))
    assert {held for what, held in fused if what == "asleep"} == asleep
    # The shards in fp32 and two states of AdamW's.
    shards = 4 * (512 * 512 + 512) * 4 // 2
    assert {held - min(asleep) for what, held in ours if what == "awake"} <= set(
        range(3 * shards, 3 * shards + 65536)
    )


def test_a_forward_asleep_says_to_wake_it():
    done = execute("-m", "lowtide", "run", str(SCRIPT), "forget")
    assert done.returncode == 1
    assert (
        "RuntimeError: lowtide: unit '0': expected parameters on cuda:0, got "
        "0.0.weight on cpu, 0.0.bias on cpu. Call model.to('cuda') before the forward."
    ) in done.stderr
