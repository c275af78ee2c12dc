"""Refuses to load the extension under a torch it was not built for.

torch promises no C++ ABI across minor versions: loading would crash, or worse, run.
"""

import torch


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
        f"this build was compiled for, got {running} (CUDA {running_cuda}). Rebuild "
        "lowtide with `pip install --no-build-isolation .` in its checkout, or run "
        f"`pip install torch=={built_for.split('+')[0]}`."
    )
