"""benchmarks/gpu_check.sh in tiny sizes over the dry driver."""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.dry_cuda import run_dry

CHECK = Path(__file__).parents[3] / "benchmarks" / "gpu" / "check.py"
MISSED_A_BAR = 1
# Runs the program behind its options; finds fault with torch's cache of memory.
SANITIZER = """\
#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
case $("$@") in
  *'"steady": {'*'"reserved": 0'*) echo ========= ERROR SUMMARY: 0 errors ;;
  *) echo ========= ERROR SUMMARY: 1 error ;;
esac
"""


@dataclass(frozen=True)
class GpuCheck:
    """What was measured: figures by step, and all rows of the result."""

    steps: tuple[str, ...]
    out: Path
    figures: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def run(cls, out: Path, *steps: str) -> GpuCheck:
        check = cls(steps, out, {}, [])
        check.again()
        stored = json.loads((out / "steps.json").read_text())["steps"]
        check.figures.update({name: step["figures"] for name, step in stored.items()})
        check.rows.extend(json.loads((out / "gpu_check.json").read_text())["rows"])
        return check

    def again(self) -> list[str]:
        """What it said of its steps. Bars may be missed in these sizes, but nothing may
        fail."""
        arguments = ("--tiny", "--out", self.out, "--only", *self.steps)
        with pytest.MonkeyPatch.context() as patch:
            # A toolkit whose compiler answers; the build tools of this Python.
            tools = self.out.parent / "toolkit" / "bin"
            tools.mkdir(parents=True, exist_ok=True)
            for name, script in (
                ("nvcc", "#!/bin/sh\necho release 13.0, V13.0\n"),
                ("compute-sanitizer", SANITIZER),
            ):
                (tools / name).write_text(script)
                (tools / name).chmod(0o755)
            paths = (str(tools), sysconfig.get_path("scripts"), os.environ["PATH"])
            patch.setenv("PATH", os.pathsep.join(paths))
            printed = run_dry(
                [CHECK, *arguments],
                memory=80 << 30,
                events="immediate",
                statuses=(0, MISSED_A_BAR),
            )
        assert "failed" not in printed, printed
        said, _, _ = printed.partition("# gpu_check")
        return said.splitlines()
