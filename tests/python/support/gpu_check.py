"""Steps of benchmarks/gpu/check.py in tiny sizes over the dry driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.dry_cuda import run_dry

ROOT = Path(__file__).parents[3]
CHECK = ROOT / "benchmarks" / "gpu" / "check.py"
MISSED_A_BAR = 1


def check_dry(out: Path, *steps: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures by step, and the rows of the result. Bars may be missed in these sizes,
    but nothing may fail."""
    printed = run_dry(
        [CHECK, "--tiny", "--out", out, *steps],
        memory=80 << 30,
        statuses=(0, MISSED_A_BAR),
    )
    assert "failed" not in printed, printed
    rows = json.loads((out / "gpu_check.json").read_text())["rows"]
    figures = {
        step: json.loads((out / "figures" / f"{step}.json").read_text())
        for step in steps
    }
    return figures, rows
