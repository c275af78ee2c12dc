"""torchao's float8 recipes dry on an H100, with its products of eight bits: what ranks
exchange, and memory, beside FSDP2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "train_float8.py"


def dry(system: str, recipe: str) -> Any:
    options = "-m lowtide phantom --world 4 --ranks 0-1 --json - --".split()
    words = [sys.executable, "-W", "ignore", *options, str(SCRIPT), system, recipe]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["nccl"]["divergences"] == []
    return found["ranks"]["0"]


def gathered_bytes(report: Any) -> int:
    """Of weights and norms; how many they are is exchanged in fewer bytes."""
    gathers = (c["bytes"] for c in report["calls"] if c["kind"] == "all_gather")
    return sum(size for size in gathers if size >= 512)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_ranks_agree_and_reserve_less_than_with_fsdp2(recipe):
    ours, theirs = dry("lowtide", recipe), dry("fsdp2", recipe)
    assert gathered_bytes(ours) == gathered_bytes(theirs)
    (mine,), (other,) = ours["devices"], theirs["devices"]
    assert mine["reserved"] < other["reserved"]
