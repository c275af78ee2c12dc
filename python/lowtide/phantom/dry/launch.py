"""Starts a program over the dry driver, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import ends

GPUS = ("a100-40", "a100-80", "h100", "h200", "b200", "l40s", "rtx4090")
DRIVER = Path(__file__).parents[2] / "liblowtide_cuda_dry.so"
# What the driver stands for is not what the user's environment says.
_FOREIGN = ("CUDA_", "LOWTIDE_DRY_", "NVIDIA_", "LD_PRELOAD", "TORCHELASTIC_")
OF_TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_MOST_DEVICES = 8  # of a machine
# What a GPU's process page-locks of its host's memory: not of the laptop's that stands
# for it, but its share of half of a DGX H100's 2 TiB (assumption).
_PINNED_BYTES = 2**41 // 2 // _MOST_DEVICES


@dataclass(frozen=True)
class Machine:
    """What the program sees.

    ``memory`` are bytes of each GPU, default the GPU's own, and ``limit`` those that
    there really are, default as many; ``devices`` default to one a rank of a machine
    of eight; ``events``: when the host knows that work is done, ``immediate`` or
    ``at_sync``, the lower and the upper bound of what is reserved.
    With ``world`` the environment is torchrun's."""

    gpu: str = "h100"
    devices: int | None = None
    memory: int | None = None
    limit: int | None = None
    events: str = "immediate"
    world: int | None = None
    rank: int = 0

    @property
    def num_devices(self) -> int:
        return self.devices or min(self.world or 1, _MOST_DEVICES)


@dataclass(frozen=True)
class Settings:
    """What the process is told beside its machine (:mod:`.program` reads it).

    ``nonzero``: the share of elements that data-dependent sizes take (``nonzero``,
    boolean masks, ``unique``), None: as :mod:`.sizes` says; ``report``: a file for its
    JSON report; ``snapshot``: one for torch's memory history; ``port``: of the
    :class:`.stores.Meeting` of a world whose ranks all run, each beside the others;
    ``limit``: seconds after which it is ended; ``told``: a file for where it then
    was (:mod:`.ends`)."""

    nonzero: float | None = None
    report: str | None = None
    snapshot: str | None = None
    port: int | None = None
    limit: float | None = None
    told: str | None = None


def environment(
    machine: Machine, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """``base`` for a process in which CUDA is the dry driver's. Raises ValueError for
    what no machine is, RuntimeError where no driver can stand for CUDA."""
    _check(machine)
    kept = {
        k: v
        for k, v in base.items()
        if not k.startswith(_FOREIGN) and k not in OF_TORCHRUN
    }
    place = _place()
    kept |= {
        "LD_PRELOAD": str(DRIVER),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [str(place), *filter(None, [base.get("LD_LIBRARY_PATH")])]
        ),
        "LOWTIDE_DRY_GPU": machine.gpu,
        "LOWTIDE_DRY_DEVICES": str(machine.num_devices),
        "LOWTIDE_DRY_EVENTS": machine.events,
        "LOWTIDE_PINNED_BYTES": base.get("LOWTIDE_PINNED_BYTES", str(_PINNED_BYTES)),
        "TRITON_LIBCUDA_PATH": str(place),
        # Kernels that were tuned here must never be taken for tuned ones.
        "TRITON_CACHE_DIR": str(place / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
    }
    if machine.world is not None:
        here = machine.num_devices
        of_machine = (min(machine.world, here), machine.rank // here)
        numbers = (machine.rank, machine.world, machine.rank % here, *of_machine)
        told = (*map(str, numbers), "127.0.0.1", "29500")
        kept |= dict(zip(OF_TORCHRUN, told, strict=True))
    if machine.memory is not None:
        kept["LOWTIDE_DRY_MEMORY"] = str(machine.memory)
    if machine.limit is not None:
        kept["LOWTIDE_DRY_LIMIT"] = str(machine.limit)
    return kept


def command(program: Sequence[str], machine: Machine, settings: Settings) -> list[str]:
    """``program``: ``file.py`` or ``-m module``, and its arguments."""
    told = asdict(settings) | {"world": machine.world or 1, "rank": machine.rank}
    return [
        *(sys.executable, str(Path(__file__).with_name("program.py"))),
        *(json.dumps(told), *program),
    ]


def run(program: Sequence[str], machine: Machine, settings: Settings) -> int:
    """Runs it to its end, with this process's input and output; returns its exit
    status. A program that did not end by itself is named on the standard error, with
    where it was."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        child = start(program, machine, replace(settings, told=str(told)))
        end = _wait(child, settings.limit, told)
    complaint = end.complaint("phantom", program[0], settings.limit)
    if complaint:
        print(complaint, file=sys.stderr)
    return end.exit_status


def start(
    program: Sequence[str], machine: Machine, settings: Settings, **files: Any
) -> subprocess.Popen[bytes]:
    """``files`` as of Popen. With a limit it leads a process group: those that it
    starts end with it."""
    return subprocess.Popen(
        command(program, machine, settings),
        env=environment(machine),
        start_new_session=settings.limit is not None,
        **files,
    )


def _wait(child: subprocess.Popen[bytes], limit: float | None, told: Path) -> ends.End:
    """Signals that this process gets go to it."""
    previous = {
        number: signal.signal(number, lambda got, _: child.send_signal(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return ends.wait(child, limit, told)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check(machine: Machine) -> None:
    if not DRIVER.exists():
        raise RuntimeError(
            "lowtide: phantom: expected a CUDA build of torch when lowtide was built "
            "(no GPU is needed), got one for CPUs. Install torch as `pip install "
            "torch` does on Linux, then lowtide again."
        )
    if machine.gpu not in GPUS:
        raise ValueError(
            f"lowtide: phantom: gpu: expected one of {', '.join(GPUS)}, got "
            f"{machine.gpu!r}."
        )
    world = 1 if machine.world is None else machine.world
    if not 0 <= machine.rank < world:
        raise ValueError(
            f"lowtide: phantom: rank: expected 0 <= rank < world = {world}, got "
            f"{machine.rank}."
        )


def _place() -> Path:
    """A folder where the driver has the names that programs look for, and caches."""
    key = hashlib.sha256(str(DRIVER).encode()).hexdigest()[:8]
    place = Path(tempfile.gettempdir()) / f"lowtide-dry-{os.getuid()}-{key}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    if not private or found.st_uid != os.getuid():
        raise RuntimeError(
            f"lowtide: phantom: {place}: expected a folder of this user's that no "
            "other may write, got something else. Remove it, or set TMPDIR."
        )
    for name in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"):
        link = place / name
        if not link.is_symlink() or link.readlink() != DRIVER:
            fresh = link.with_suffix(f".{uuid.uuid4().hex}")  # threads come here, too
            fresh.symlink_to(DRIVER)
            fresh.replace(link)
    return place
