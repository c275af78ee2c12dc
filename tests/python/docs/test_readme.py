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
