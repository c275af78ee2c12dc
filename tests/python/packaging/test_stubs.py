"""`_C.pyi` says exactly what the extension has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# What pybind11 does to every class, and to those that only C++ makes.
PYBIND11 = re.compile(
    r"metaclass differs|__init__ is inconsistent, stub does not have \*args"
)


def disagreements(module: str) -> list[str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy.stubtest", module, "--concise"),
            *("--mypy-config-file", "pyproject.toml"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if not PYBIND11.search(line)]


@pytest.mark.slow
def test_stub_matches_the_extension():
    found = disagreements("lowtide._C")
    assert found == [], (
        "python/lowtide/_C.pyi and csrc/python/*.cpp disagree; change the stub "
        "to say what the bindings do:\n" + "\n".join(found)
    )
