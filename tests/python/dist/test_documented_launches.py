"""The commands that docs/frameworks.md begins with, as they stand there but for the
number of ranks, which is two of gloo's, beside the same without lowtide."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.commands import run_together

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
PATHS = (SCRIPTS, ROOT / "examples/frameworks", ROOT / "tests/python")
LAUNCHERS = {"torchrun", "accelerate"}


def documented() -> list[str]:
    lines = (ROOT / "docs/frameworks.md").read_text().splitlines()
    block = [line.strip() for line in lines if line.startswith("    ")]
    return [line for line in block if line.split()[0] in LAUNCHERS]


def test_every_launcher_is_documented():
    assert {command.split()[0] for command in documented()} == LAUNCHERS
    assert any(" run -m " in command for command in documented())


@pytest.mark.parametrize("command", documented())
def test_a_documented_launch_has_the_bits_of_fsdp2(command):
    ours = command.replace("-node 8", "-node 2")
    theirs = ours.replace("-m lowtide run ", "")
    assert "lowtide" not in theirs
    environment = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((*map(str, PATHS), *sys.path)),
        "PET_STANDALONE": "1",  # a port that is free
    }
    folder = SCRIPTS / f"by_{command.split()[0]}"
    outputs = run_together(
        [ours.split(), theirs.split()],
        timeout=240,
        folder=folder,
        environment=environment,
    )
    mine, other = (
        [line for line in output.splitlines() if line.startswith(("loss ", "digest "))]
        for output in outputs
    )
    assert [line.split()[0] for line in other] == [*3 * ["loss"], "digest"]
    assert mine == other
    assert outputs[0].count("lowtide memory on cpu (this rank)") == 1
    assert "lowtide: run: " not in outputs[1]
    if "--lr 3e-4" in command:
        assert mine[-1].endswith(" lr 0.0003")
