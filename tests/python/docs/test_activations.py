"""docs/activations.md: its program runs, its picture is the stored figures'."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "activations.md"


def test_the_program_runs_and_reports_its_names(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    program = tmp_path / "program.py"
    program.write_text(code[1])
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    # 256 x 64 and 256 x 256 values in fp32, in four blocks.
    assert ["residual", "offload", "4", "0", "B", "256.00", "KiB"] in [
        row[:7] for row in rows
    ]
    assert ["hidden", "save", "4", "1.00", "MiB"] in [row[:5] for row in rows]


def test_the_picture_is_drawn_from_the_stored_figures() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import activation_picture as picture
    finally:
        sys.path.pop(0)
    assert picture.PICTURE.read_text() == picture.draw(picture.figures())
