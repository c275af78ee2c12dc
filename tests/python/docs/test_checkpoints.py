"""docs/checkpoints.md: its program runs, and resumes where it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


@pytest.mark.slow
def test_the_program_runs_and_resumes(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    program = tmp_path / "program.py"
    program.write_text(code[1])
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    said = []
    for _ in range(2):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", program),
            ],
            env=os.environ | {"CHECKPOINTS": str(folder), "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        # Two ranks write at once, the ends of their lines by themselves.
        said += sorted(set(re.findall(r"trained .*?\]", done.stdout)))
    assert said == [
        "trained from step 0, kept ['step-2', 'step-3']",
        "trained from step 3, kept ['step-5', 'step-6']",
    ]
