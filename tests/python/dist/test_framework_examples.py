"""examples/frameworks under `python -m lowtide run`, unedited, beside FSDP2: what they
print, the digest of their parameters among it, and what is reported of them.

accelerate and torchtitan take an accelerator for granted; programs of support/ take
CPUs for one before they run the script.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.commands import ENVIRONMENT, one_agent

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/frameworks"
SUPPORT = ROOT / "tests/python/support"
LEAVE = Path(__file__).parent / "scripts/leave_at_exit.py"


@dataclass(frozen=True)
class Example:
    root: str  # the class of the model that is reported
    lines: int  # of losses
    launcher: str = ""  # of support/


CASES = {
    "accelerate": Example("Sequential", 16 // 2, "accelerate_on_cpus.py"),
    "transformers": Example("LlamaForCausalLM", 12, "accelerate_on_cpus.py"),
    "lightning": Example("Transformer", 8),
    "torchtitan": Example("Transformer", 4, "titan_on_cpus.py"),
    "peft": Example("PeftModel", 8),
}


def run(name: str, folder: Path, *options: str) -> tuple[list[str], list[str]]:
    """What rank 0 prints of the training, and what is said on the standard error."""
    folder.mkdir()
    launcher = CASES[name].launcher
    done = subprocess.run(
        [
            *one_agent(2),
            *options,
            str(LEAVE),
            *([str(SUPPORT / launcher)] if launcher else []),
            str(EXAMPLES / f"with_{name}.py"),
            str(folder),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    printed = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("loss ", "step ", "parameters "))
    ]
    return printed, done.stderr.splitlines()


def test_every_example_is_here():
    scripts = {path.stem for path in EXAMPLES.glob("with_*.py")}
    assert scripts == {f"with_{name}" for name in CASES}
    for path in EXAMPLES.glob("*.py"):
        assert "import lowtide" not in path.read_text()


@pytest.mark.slow("frameworks")
@pytest.mark.parametrize("name", CASES)
def test_runs_unedited_with_the_bits_of_fsdp2(tmp_path, name):
    theirs, _ = run(name, tmp_path / "fsdp2")
    ours, said = run(name, tmp_path / "lowtide", "-m", "lowtide", "run")
    assert sum(" " in line and "loss" in line for line in ours) == CASES[name].lines
    assert ours[-1].startswith("parameters ")
    assert ours == theirs
    # Of the model that was saved and of the one that resumed; on rank 0 alone.
    assert said.count(f"lowtide: run: {CASES[name].root}") == 2
    assert said.count("lowtide memory on cpu (this rank)") == 2
