"""docs/sequence_parallel.md: its program runs, its table is the stored figures'."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "sequence_parallel.md"
RESULTS = ROOT / "benchmarks" / "results" / "case3_gather.json"


def test_the_program_runs_on_two_ranks(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = tmp_path / "mlp.py"
    program.write_text(code)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2", str(program)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        assert f"rank {rank}: gradient (128, 2, 64)" in done.stdout


def test_the_table_is_of_the_stored_figures() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    stored = {
        row["quantity"]: row["value"]
        for row in rows
        if row["system"] == "lowtide" and "less held" in row["quantity"]
    }
    for config, layers in (("8B", 32), ("70B", 80)):
        cells = [stored[f"{config}, t {t}: less held, {layers} layers"] for t in (4, 8)]
        line = f"| {config} Llama, less than with the gathered tensors | "
        assert (
            line + " | ".join(f"{cell:.1f} GiB" for cell in cells) in PAGE.read_text()
        )
