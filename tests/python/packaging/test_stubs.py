"""`_C.pyi` says exactly what the extension has."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_stub_matches_the_extension():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy.stubtest", "lowtide._C"),
            *("--mypy-config-file", "pyproject.toml", "--concise"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (
        "python/lowtide/_C.pyi and csrc/python/*.cpp disagree; make the stub say "
        f"what the bindings do:\n{done.stdout}{done.stderr}"
    )
