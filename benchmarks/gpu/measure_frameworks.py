"""The examples of frameworks under `lowtide run`, unedited, beside FSDP2: what they
print of losses, norms and the bits of the parameters."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import bars
from bars import with_bar
from case import Row
from figures import Figures, Programs
from launch import REPOSITORY
from scale import Scale

SECONDS = 200  # that an example may take
# FSDP2's own is run twice: what differs then is not deterministic.
HOW: dict[str, tuple[str, ...]] = {
    "fsdp2": (),
    "fsdp2 again": (),
    "lowtide": ("-m", "lowtide", "run"),
}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone")
OF_TRAINING = ("loss ", "step ", "parameters ")


def frameworks(scale: Scale, programs: Programs) -> Figures:
    """Lines by framework and by how it ran; one rank on NCCL."""
    keys = [(name, how) for name in scale.frameworks for how in HOW]
    with ThreadPoolExecutor(max_workers=len(HOW)) as threads:
        said = list(threads.map(lambda key: printed(key[0], HOW[key[1]]), keys))
    found: Figures = {name: {} for name in scale.frameworks}
    for (name, how), lines in zip(keys, said, strict=True):
        found[name][how] = lines
    return found


def printed(name: str, options: Sequence[str]) -> list[str]:
    """What the example says of the training."""
    script = REPOSITORY / "examples" / "frameworks" / f"with_{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *TORCHRUN, *options, str(script), str(Path(folder, "of"))],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )
    if done.returncode != 0:
        raise RuntimeError(f"{script.name}: {done.stderr[-2000:]}")
    return of_training(done.stdout.splitlines())


def of_training(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith(OF_TRAINING)]


def frameworks_rows(figures: Figures) -> Iterator[Row]:
    for name, said in figures.items():
        yield from differing(name, said)


def differing(name: str, said: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """Lines that are not those of ``said["fsdp2"]``, by how it ran."""
    theirs = said["fsdp2"]
    for how, lines in said.items():
        if how == "fsdp2":
            continue
        different = sum(a != b for a, b in zip_longest(lines, theirs))
        quantity = f"{name}, {how}: lines of {len(theirs)} that differ from FSDP2's"
        system = "lowtide" if how == "lowtide" else "fsdp2"
        yield from with_bar(quantity, different, bars.NONE, system=system)
