"""What the programs that others measured share."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from foreign import foreign


def peaks() -> dict[str, int]:
    return {
        "reserved": torch.cuda.memory_reserved(),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(),
    }


def use_packages() -> None:
    """Those of requirements/published.txt, behind the environment's own."""
    sys.path.append(str(foreign("packages")))


def check_out(repository: str, commit: str, *wanted: str, into: Path) -> None:
    """Those of the files and folders ``wanted`` that a commit has."""
    git = ["git", "-C", str(foreign(repository))]
    listed = subprocess.run(
        [*git, "ls-tree", "--name-only", commit],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    present = [name for name in wanted if name in listed]
    archive = subprocess.run(
        [*git, "archive", commit, "--", *present], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(into, filter="data")


def file_at(repository: str, commit: str, path: str) -> str:
    return subprocess.run(
        ["git", "-C", str(foreign(repository)), "show", f"{commit}:{path}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
