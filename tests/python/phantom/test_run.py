"""`lowtide run` inside of `lowtide phantom` and `lowtide plan`: accelerate's own choice
of FSDP2, on GPUs that compute nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples/frameworks/with_accelerate.py"


def execute(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lowtide", *command, "--world", "2", "--"),
            *("-m", "lowtide", "run", str(EXAMPLE), str(folder / "saved")),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_a_framework_runs_dry(tmp_path):
    done = execute(tmp_path, "phantom")
    assert done.stdout.count("loss 1.0 norm 1.0\n") == 4
    assert done.stderr.count("fully_shard is lowtide's in torch.") == 1
    assert done.stderr.count("lowtide memory on cuda:0 (this rank)") == 2


@pytest.mark.slow
def test_a_framework_is_planned(tmp_path):
    done = execute(tmp_path, "plan")
    assert "lowtide's ledger" in done.stdout
    assert "with_accelerate.py" in done.stdout
