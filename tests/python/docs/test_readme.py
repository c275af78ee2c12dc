"""The README's code runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[3] / "README.md"


def quickstart() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return code


def test_quickstart_runs_verbatim(tmp_path: Path) -> None:
    code = quickstart()
    assert len(code.strip().splitlines()) <= 21  # a comment and 20 lines
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2", str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "sharded_gradients" in run.stdout
    assert "planned" in run.stdout


def test_every_kind_of_figure_is_explained() -> None:
    text = README.read_text()
    _, _, rest = text.partition("<!-- benchmarks:begin -->")
    table, _, after = rest.partition("<!-- benchmarks:end -->")
    last_cells = [line.split("|")[-2] for line in table.strip().splitlines()[2:]]
    kinds = {kind.strip() for cell in last_cells for kind in cell.split("/")}
    assert kinds == {"measured", "simulated", "arithmetic"}
    for kind in kinds:
        assert f"*{kind}*: " in after, kind


def test_no_figure_is_said_to_be_of_a_gpu_before_a_run_is_stored() -> None:
    stored = README.parent / "benchmarks" / "results" / "gpu_check.json"
    says_none = "No figure\nhere comes from a GPU" in README.read_text()
    assert says_none != stored.exists()
