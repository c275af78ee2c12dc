"""``LOWTIDE_DEBUG_LOG=folder``: what a training did, one text file a rank, the same for
the same training: ``diff`` says where two runs part (docs/debugging.md). Lines have no
times, addresses or process ids."""

import functools
import os
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from lowtide._base.debugging import require_values

_VARIABLE = "LOWTIDE_DEBUG_LOG"


@functools.cache
def enabled() -> bool:
    if not os.environ.get(_VARIABLE):
        return False
    require_values(_VARIABLE)
    return True


def write(line: str) -> None:
    """Written at once: a process that hangs or ends has said what it did before."""
    _file().write(f"{line}\n")


@functools.cache
def _file() -> TextIO:
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = Path(os.environ[_VARIABLE])
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"rank-{rank}.txt").open("w", buffering=1)
