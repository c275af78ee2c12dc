"""The README's code runs as printed."""

import json
import re
import sys
from pathlib import Path

import check
import tables

from support.commands import one_agent, run_together

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"


def quickstart() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return code


def test_quickstart_runs_verbatim(tmp_path: Path) -> None:
    code = quickstart()
    assert len(code.strip().splitlines()) <= 21  # a comment and 20 lines
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    command = [*one_agent(2), str(script)]
    (printed,) = run_together([command], timeout=240, folder=tmp_path)
    assert "sharded_gradients" in printed
    assert "planned" in printed


def test_quickstart_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "quickstart.py").write_text(quickstart())
    command = [
        *(sys.executable, "-m", "lowtide", "plan", "--world", "2"),
        *("--json", "plan.json", "--", "quickstart.py"),
    ]
    run_together([command], timeout=240, folder=tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["notes"] == []
    # Half of four weights and biases; AdamW keeps two more of each.
    shard = 4 * (64 * 64 + 64) * 4 // 2
    assert plan["by_category"]["parameters"] >= shard
    assert plan["by_category"]["optimizer_state"] >= 2 * shard


def test_every_kind_of_figure_is_explained() -> None:
    text = README.read_text()
    _, _, rest = text.partition("<!-- benchmarks:begin -->")
    table, _, after = rest.partition("<!-- benchmarks:end -->")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    last_cells = [line.split("|")[-2] for line in rows if not line.startswith("| |")]
    kinds = {kind.strip() for cell in last_cells for kind in cell.split("/")}
    assert kinds == {"measured", "simulated", "arithmetic"}
    for kind in kinds:
        assert f"*{kind}*: " in after, kind


def test_what_a_gpu_said_is_what_is_stored() -> None:
    stored = ROOT / "benchmarks" / "results" / "gpu_check"
    described = check.kept(stored, check.ENVIRONMENT)
    page = (ROOT / "docs" / "gpu_check.md").read_text()
    assert (
        tables.replace_region(page, check.page(check.read(stored), described)) == page
    )
    assert f"One {described['GPU'].split()[-1]} has run" in README.read_text()
