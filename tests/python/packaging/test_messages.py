"""What a build says when something it needs is missing: one line, the next step.

A stand-in for torch on PYTHONPATH gives the build each situation; configuring ends
before anything is compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(sys.executable)
VERSIONS = "2.11, 2.12, 2.13, 2.14 or 2.15"

FAKE_TORCH = """
from types import SimpleNamespace
__version__ = {version!r}
version = SimpleNamespace(cuda={cuda!r})
def compiled_with_cxx11_abi(): return True
"""


def build_message(
    tmp_path: Path, torch_source: str, python: Path = PYTHON, **environ: str
) -> str:
    """The last line of `setup.py build_ext` with this torch and environment."""
    (tmp_path / "torch.py").write_text(torch_source)
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [
            *(str(python), "setup.py", "build_ext"),
            *("--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path)),
        ],
        env=keep | {"PYTHONPATH": str(tmp_path)} | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def fake_torch(version: str = "2.11.0", cuda: str | None = "13.0") -> str:
    return FAKE_TORCH.format(version=version, cuda=cuda)


def test_missing_torch(tmp_path):
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\")"
    message = build_message(tmp_path, missing)
    assert message.startswith(f"lowtide: torch: expected torch {VERSIONS} in ")
    assert "No module named 'torch'" in message
    assert message.endswith(f"Run `{PYTHON} -m pip install 'torch==2.11.*'`.")


def test_other_torch_minor(tmp_path):
    message = build_message(tmp_path, fake_torch("2.16.1+cpu"))
    assert message.startswith(
        f"lowtide: torch: expected {VERSIONS}, got 2.16.1+cpu in "
    )
    assert message.endswith(f"Run `{PYTHON} -m pip install 'torch==2.11.*'`.")


def test_missing_compiler(tmp_path):
    message = build_message(tmp_path, fake_torch(), CXX="/nowhere/g++")
    assert message == (
        "lowtide: C++ compiler: expected one with C++20, got none "
        "(CXX='/nowhere/g++'). Run `apt install g++`, or set CXX."
    )


def test_missing_build_tool(tmp_path, bare_venv):
    message = build_message(tmp_path, fake_torch(), python=bare_venv, PATH="")
    assert message == (
        f"lowtide: cmake: expected it in {bare_venv.parent} or PATH, got none. "
        f"Run `{bare_venv} -m pip install cmake`."
    )


def test_cuda_on_without_nvcc(tmp_path):
    message = build_message(
        tmp_path, fake_torch(), LOWTIDE_CUDA="ON", CUDA_HOME="/nowhere"
    )
    assert message == (
        "lowtide: LOWTIDE_CUDA=ON: expected nvcc 13.0 (/nowhere/bin/nvcc), got none. "
        "Install the CUDA toolkit 13.0 and set CUDA_HOME, or set LOWTIDE_CUDA=OFF."
    )


def test_cuda_on_with_another_major(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'")
    nvcc.chmod(0o755)
    message = build_message(
        tmp_path, fake_torch(), LOWTIDE_CUDA="ON", CUDA_HOME=str(tmp_path)
    )
    assert message == (
        "lowtide: LOWTIDE_CUDA=ON: expected nvcc of torch's CUDA major (13.0), "
        f"got 12.8 ({nvcc}). Set CUDA_HOME to a matching toolkit, or set "
        "LOWTIDE_CUDA=OFF."
    )


def test_cuda_on_under_a_cpu_build_of_torch(tmp_path):
    message = build_message(tmp_path, fake_torch(cuda=None), LOWTIDE_CUDA="ON")
    assert message == (
        "lowtide: LOWTIDE_CUDA=ON: expected a CUDA build of torch, got the CPU build "
        "2.11.0. Install a CUDA build of torch, or set LOWTIDE_CUDA=OFF."
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LOWTIDE_CUDA", "YES", "expected AUTO, ON or OFF, got 'YES'"),
        ("LOWTIDE_CUDA_ARCHS", "sm_90", "such as 9.0 or 10.0+PTX, got 'sm_90'"),
    ],
)
def test_bad_option(tmp_path, name, value, expected):
    message = build_message(tmp_path, fake_torch(), **{name: value})
    assert message.startswith(f"lowtide: {name}: expected")
    assert expected in message
