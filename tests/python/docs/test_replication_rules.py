"""docs/replication_rules.md: its programs run, its table is the engine's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import spmd

PAGE = (Path(__file__).parents[3] / "docs" / "replication_rules.md").read_text()
PROGRAMS = re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE, re.DOTALL)


def run(program: Path, *launcher: str) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("code", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])
def test_programs_run(tmp_path: Path, code: str, name: str) -> None:
    program = tmp_path / f"{name}.py"
    program.write_text(code)
    if "torchrun" not in code:
        run(program)
        return
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # The ranks write to one pipe, piece by piece.
    printed = run(program, *torchrun)
    values = re.findall(r"-?\d+\.\d+", printed)
    assert printed.count("x.grad") == 2
    assert len(values) == 2 and values[0] == values[1]


def test_every_python_block_is_run() -> None:
    assert len(PROGRAMS) == PAGE.count("```python") == 3


def test_the_table_is_the_engines() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.) -> (.) \| `(\w+)` (.) -> (.)", PAGE, re.M)
    expected = [
        (f, str(a), str(b), g, str(c), str(d))
        for (f, a, b), (g, c, d) in spmd.transitions()
    ]
    assert rows == expected
