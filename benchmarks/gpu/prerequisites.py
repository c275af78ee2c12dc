"""What gpu_check needs of a machine, looked up without lowtide and, where it is
missing, without torch."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
GIB = 1 << 30
LEAST_MEMORY = 75 * GIB  # an H100 of 80 GB gives 79
TOOLKIT = "CUDA toolkit 13 (nvcc)"
ALL = (
    "It needs one NVIDIA GPU (H100 or H200), Python >= 3.10 with its headers, torch "
    "2.11 for CUDA 13 and numpy, nvcc 13, g++, cmake and ninja, and no network. "
    "GoogleTest and compute-sanitizer are used where they are."
)


class Missing(Exception):
    """Something that is needed; the message says what was expected and found."""

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        super().__init__(
            f"lowtide: gpu_check: expected {expected}, got {got}. {remedy}"
        )


def check(*, any_gpu: bool = False) -> dict[str, str | int]:
    """Facts for the result's environment. Raises Missing for the first that is not
    there. ``any_gpu``: of any size, for runs whose figures mean nothing."""
    torch = torch_for_cuda()
    properties = the_gpu(torch, any_gpu)
    importable("numpy")
    for name in ("cmake", "ninja"):
        tool(name)
    compiler()
    facts: dict[str, str | int] = {
        "lowtide": lowtide_version(),
        "GPU": properties.name,
        "GPU memory GiB": round(properties.total_memory / GIB),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "nvcc": nvcc_version(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 0,
    }
    if found := driver_version():
        facts["driver"] = found
    return facts


def lowtide_version() -> str:
    """Of this checkout; Python has a parser of TOML from 3.11 on only."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


def driver_version() -> str:
    """Empty where nvidia-smi does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    done = subprocess.run([program, *query], capture_output=True, text=True)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else ""


def importable(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(
            f"{name} in {sys.executable}",
            f"'{error}'",
            f"Run `{sys.executable} -m pip install {name}`, or set PYTHON.",
        ) from error


def torch_for_cuda() -> Any:
    torch = importable("torch")
    cuda = torch.version.cuda or "none"
    if not torch.__version__.startswith("2.11.") or not cuda.startswith("13."):
        raise Missing(
            "torch 2.11 built for CUDA 13",
            f"torch {torch.__version__} with CUDA {cuda}",
            "Install torch==2.11.0 from the cu130 wheels, or set PYTHON.",
        )
    return torch


def the_gpu(torch: Any, any_gpu: bool) -> Any:
    remedy = "Run it on a machine with an H100 or H200."
    if not torch.cuda.is_available():
        raise Missing(
            "one NVIDIA GPU", f"none that torch {torch.__version__} can use", remedy
        )
    properties = torch.cuda.get_device_properties(0)
    if not any_gpu and (properties.major < 9 or properties.total_memory < LEAST_MEMORY):
        raise Missing(
            f"a GPU of compute capability >= 9.0 with {LEAST_MEMORY // GIB} GiB",
            f"{properties.name} ({properties.major}.{properties.minor}, "
            f"{properties.total_memory / GIB:.0f} GiB)",
            remedy,
        )
    return properties


def tool(name: str) -> str:
    """A program of this Python's environment, or on PATH."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    found = shutil.which(name, path=places)
    if found is None:
        raise Missing(
            f"{name} on PATH or beside {sys.executable}",
            "none",
            f"Run `pip install {name}`.",
        )
    return found


def compiler() -> str:
    """Of C++: one that CMake will find."""
    for name in (os.environ.get("CXX"), "c++", "g++"):
        if name and (found := shutil.which(name)):
            return found
    raise Missing("a C++ compiler (c++ or g++) on PATH", "none", "Install g++.")


def of_toolkit(name: str) -> str | None:
    """A program of the CUDA toolkit that CMake will use."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    bins = [str(Path(home, "bin")) for home in homes if home]
    return shutil.which(name, path=os.pathsep.join([*bins, os.environ["PATH"]]))


def nvcc_version(
    run: Callable[..., Any] = subprocess.run,
) -> str:
    nvcc = of_toolkit("nvcc")
    remedy = "Install it, and set CUDA_HOME if it is not in /usr/local/cuda."
    if nvcc is None:
        raise Missing(TOOLKIT, "none", remedy)
    text = run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+\.\d+)", text)
    version = release[1] if release else "unknown"
    if not version.startswith("13."):
        raise Missing(TOOLKIT, f"{version} ({nvcc})", remedy)
    return version
