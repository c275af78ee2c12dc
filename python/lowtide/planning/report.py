"""The result of planning a training program. All sizes are bytes on one rank."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from lowtide.phantom.clock import StepTime
from lowtide.phantom.nccl_buffers import Communicator


@dataclasses.dataclass(frozen=True)
class Moment:
    """A part of the last step."""

    allocated: int  # peak
    reserved: int  # peak
    by_category: dict[str, int]  # when most was allocated


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Allocations that are live at the peak and alike: the same size, category and
    line, made in modules that differ by a number only."""

    bytes: int  # of each
    count: int
    category: str
    name: str  # of a parameter or module, with * where they differ; "" if unknown
    operator: str
    moment: str
    line: str  # file:line function; in backward: of the operator's forward
    code: str  # the text of that line

    @property
    def total(self) -> int:
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True)
class Saving:
    """Something that would lower the peak."""

    what: str  # "checkpoint", "chunk_loss", ...
    advice: str
    allocated: int  # less at the peak
    reserved: int | None  # less at the peak, where the allocator was asked again
    basis: str  # "arithmetic" over the recorded run, or "replayed" on the allocator
    by_run: int | None = None  # less allocated in a second run with the change


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The last step; a sample is the largest of ``events_per_sample``."""

    events_per_sample: int
    allocated: dict[str, list[int]]  # by category
    reserved: list[int]
    moments: list[str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """``print`` it for a summary; :meth:`write` gives everything as JSON."""

    program: str
    world: int
    rank: int
    steps: int
    allocator: dict[str, Any]  # settings
    device_memory: int | None
    peak_allocated: int
    peak_reserved: int  # by a device that is never behind
    peak_reserved_bound: int  # by one that is behind until the host waits
    reserved_at_peak: int  # when most is allocated
    peak_moment: str
    peak_step: int  # from 1; after the last step one more
    by_category: dict[str, int]  # when most is allocated
    moments: dict[str, Moment]
    largest: list[Tensors]
    fits: bool | None  # beside NCCL's buffers; None: no device_memory was given
    retries: int  # flushes of the cache on a device of that size
    savings: list[Saving]
    lowtide: dict[str, Any] | None  # lowtide.memory_report(model)
    timeline: Timeline
    step_time: StepTime | None  # of the last step, simulated; None: not asked for
    pinned: int | None  # bytes of page-locked host memory; None: not known
    communicators: list[Communicator]  # with several ranks
    notes: list[str]
    seconds: float
    host_memory: int  # peak RSS of the simulation

    @property
    def fragmentation(self) -> int:
        """Reserved beyond what is allocated, at the peak of each."""
        return self.peak_reserved - self.peak_allocated

    @property
    def nccl_buffers(self) -> int:
        """Of all communicators; arithmetic, beside what is reserved."""
        return sum(each.bytes for each in self.communicators)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "fragmentation": self.fragmentation,
            "nccl_buffers": self.nccl_buffers,
        }

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def __str__(self) -> str:
        lines = [
            f"{self.program}: rank {self.rank} of {self.world}",
            f"peak allocated {gib(self.peak_allocated)}, "
            f"reserved {gib(self.peak_reserved)}",
            *(f"  {name:<20}{gib(b):>12}" for name, b in self.by_category.items()),
        ]
        return "\n".join(lines)


def gib(num_bytes: float) -> str:
    """Three digits: 18.8 GiB, 512 MiB, 40 KiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= scale or unit == "KiB":
            value = num_bytes / scale
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError


def parse_bytes(text: str) -> int:
    """``80GiB``, ``80GB``, ``512MiB`` or plain bytes from 1 MiB on: less is a number
    whose unit was left out. Raises ValueError."""
    units = {"B": 1, "": 1}
    for power, letter in enumerate("KMGT", start=1):
        units[f"{letter}IB"] = 1024**power
        units[f"{letter}B"] = 1000**power
        units[letter] = 1024**power
    stripped = text.strip().upper()
    number = stripped.rstrip("BIKMGT ")
    unit = stripped[len(number) :].strip()
    try:
        value = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value <= 0 or (not unit and value < 1 << 20):
        raise ValueError(
            "lowtide: --device-memory: expected a size such as 80GiB or 512MiB, got "
            f"{text!r}. Write a number and a unit."
        )
    return value
