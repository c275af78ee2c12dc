"""The code and the commands of docs/plan.md run as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/plan.md").read_text()
SCRIPT = ROOT / "tests/python/phantom/scripts/train_fsdp2.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run(arguments: list[str], directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_python(tmp_path):
    (code,) = [block for block in blocks("python") if "lowtide.plan(" in block]
    (tmp_path / "plan_mlp.py").write_text(code)
    out = run(["plan_mlp.py"], tmp_path)
    assert "step: rank 0 of 1" in out
    assert re.search(r"parameters +64\.0 MiB", out)
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("command", blocks("sh"))
def test_commands(tmp_path, command):
    python, *arguments = shlex.split(command)
    assert python == "python"
    if "--" in arguments:  # the reader's script
        (tmp_path / "train.py").write_text(SCRIPT.read_text())
        arguments = [*arguments[: arguments.index("--")], "--", "train.py"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    out = run(arguments, tmp_path)
    if "phantom" in arguments:
        assert '"gpu": "NVIDIA H100 80GB HBM3"' in out
        assert '"all_gather' in out
        return
    assert "rank 0 of 8, 3 steps" in out
    # NVIDIA keeps a little of an H100 for itself.
    given = "80.0" if "--device-memory" in arguments else "79.1"
    assert f"fits into {given} GiB" in out
