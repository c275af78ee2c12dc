"""`make test` runs every test file: a runner's default must not hide a folder."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_pytest_collects_every_test_file():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.split("::")[0] for line in done.stdout.splitlines()}
    written = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests" / "python").rglob("test_*.py")
    }
    assert written - collected == set()
