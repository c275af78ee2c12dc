"""Where programs and packages of others are looked for."""

from __future__ import annotations

import os
from pathlib import Path

FOREIGN = "LOWTIDE_FOREIGN"


class Absent(RuntimeError):
    """What somebody else's program needs is not on this machine."""

    def __init__(self, why: str = f"{FOREIGN} names no folder") -> None:
        super().__init__(why)


def has_foreign() -> bool:
    return bool(os.environ.get(FOREIGN))


def foreign(name: str) -> Path:
    """A clone in the folder, or ``packages``."""
    if not has_foreign():
        raise Absent
    return Path(os.environ[FOREIGN]) / name
