"""What a stored figure must say about where it was obtained; no names or paths."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

import lowtide


def describe() -> dict[str, str | int]:
    return {
        "lowtide": lowtide.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "load average at start": str(round(os.getloadavg()[0], 1)),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
