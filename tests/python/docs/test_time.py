"""The code and the command of docs/time.md run as printed."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/time.md").read_text()
SCRIPT = ROOT / "tests/python/phantom/scripts/train_fsdp2.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run(arguments: list[str], directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_python(tmp_path):
    (program,), (_, command) = blocks("python"), blocks("sh")
    (tmp_path / "time_step.py").write_text(program)
    python, *arguments = shlex.split(command)
    assert python == "python"
    out = run(arguments, tmp_path)
    assert re.search(r"^simulated, ms +seconds +compute +communication +exposed", out)
    assert re.search(r"^backward +\d", out, re.MULTILINE)
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert (tmp_path / "step.png").exists()


def test_command(tmp_path):
    python, *arguments = shlex.split(blocks("sh")[0])
    assert python == "python"
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    out = run([*arguments[: arguments.index("--")], "--", "train.py"], tmp_path)
    assert "Last step on H200 SXM 141GB, ms, simulated" in out
    assert (tmp_path / "step.json").exists()


def test_steps_beside_a_gpu_are_those_measured():
    """If the order of the two turns, what the page says of it is no longer true."""
    measured = ROOT / "benchmarks/results/gpu_check/clock.json"
    steps = json.loads(measured.read_text())["steps"]
    gpu, clock = steps["CUDA"], steps["clock"]
    assert clock["lowtide"] < clock["fsdp2"] and gpu["lowtide"] > gpu["fsdp2"]
    for ms in (*gpu.values(), *clock.values()):
        assert f"{ms:.1f}" in PAGE
    fsdp2, lowtide = (clock[system] / gpu[system] for system in ("fsdp2", "lowtide"))
    assert f"**{fsdp2:.2f}; {lowtide:.2f}**" in PAGE
