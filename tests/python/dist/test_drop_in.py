"""An FSDP2 script moves over by changing one import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
FSDP2_IMPORT = "from torch.distributed.fsdp import "
TIMEOUT_S = 120


def run_script(text: str, directory: Path) -> list[str]:
    """What rank 0 prints."""
    directory.mkdir()
    script = directory / "train.py"
    script.write_text(text)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(SCRIPTS / "run_and_leave.py"),
            str(script),
            str(directory / "checkpoint"),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_one_changed_import_prints_the_same_losses(tmp_path):
    before = (SCRIPTS / "fsdp2_script.py").read_text().splitlines(keepends=True)
    after = [line.replace(FSDP2_IMPORT, "from lowtide import ") for line in before]
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1

    theirs = run_script("".join(before), tmp_path / "fsdp2")
    ours = run_script("".join(after), tmp_path / "lowtide")
    assert len(theirs) == 9 + 1
    assert ours == theirs
