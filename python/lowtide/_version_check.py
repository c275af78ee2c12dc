"""Refuses to load the extension under a Python or torch it was not built for.

torch promises no C++ ABI across minor versions: loading would crash, or worse, run.
"""

import importlib.machinery
import sys

import torch

_REBUILD = (
    "Install the wheel of lowtide for what is here, rebuild lowtide with "
    "`pip install --no-build-isolation .` in its checkout, or run"
)


def check_python(*, built_for: str) -> None:
    """Raise ImportError unless this Python has the C ABI ``built_for``, such as
    ``cpython-311-x86_64-linux-gnu``: the extension would not be found."""
    running = importlib.machinery.EXTENSION_SUFFIXES[0].strip(".").removesuffix(".so")
    if running != built_for:
        raise ImportError(
            f"lowtide: Python: expected {built_for}, which this build was compiled "
            f"for, got {running} ({sys.executable}). Run `{sys.executable} -m pip "
            "install` with the wheel of lowtide for this Python, or with "
            "`--no-build-isolation .` in its checkout."
        )


def check_torch(*, built_for: str, built_for_cuda: str) -> None:
    """Raise ImportError unless torch has the minor version this build was compiled
    for and, if it was compiled with CUDA, the same CUDA major version."""
    running, running_cuda = str(torch.__version__), torch.version.cuda or "none"
    same_torch = running.split(".")[:2] == built_for.split(".")[:2]
    same_cuda = running_cuda.split(".")[0] == built_for_cuda.split(".")[0]
    if same_torch and (same_cuda or not built_for_cuda):
        return
    raise ImportError(
        f"lowtide: torch: expected {built_for} (CUDA {built_for_cuda or 'off'}), which "
        f"this build was compiled for, got {running} (CUDA {running_cuda}). {_REBUILD} "
        f"`{_install(built_for.split('+')[0], built_for_cuda)}`."
    )


def _install(version: str, cuda: str) -> str:
    """The command for torch's wheel. Without the CUDA in the version pip takes a wheel
    of another one for satisfied."""
    if not cuda:
        return f"pip install torch=={version}"
    build = "cu" + "".join(cuda.split(".")[:2])
    index = f"https://download.pytorch.org/whl/{build}"
    return f"pip install torch=={version}+{build} --index-url {index}"
