"""What is asked of the process that runs a program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelFile:
    """A file with ``plan_model``, and how its model is trained; docs/plan.md."""

    path: str
    config: str | None = None
    system: Literal["lowtide", "fsdp2", "ddp"] = "lowtide"
    sequence: int = 8192
    batch: int = 1
    checkpoint: Literal["none", "selective", "full"] = "full"
    loss: Literal["plain", "chunked", "vocabulary"] = "plain"
    microbatches: int = 1


@dataclass(frozen=True)
class Script:
    """A training script, run as ``python PATH ARGUMENTS``."""

    path: str
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Module:
    """A training program, run as ``python -m NAME ARGUMENTS``."""

    name: str
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Functions:
    """``step(factory())``, then ``step`` again with the same value."""

    factory: Callable[[], Any]
    step: Callable[[Any], Any]


Program = ModelFile | Script | Module | Functions


@dataclass(frozen=True)
class Request:
    program: Program
    world: int = 1
    rank: int = 0
    torchrun: bool = True  # a script's environment: RANK and the like are set
    steps: int = 3
    device_memory: int | None = None
    allocator: dict[str, Any] = field(default_factory=dict)  # of phantom.install
    allow: Sequence[str] = ()  # operators that are not reviewed, "aten::foo"
    gpu: str | None = None  # of phantom.dry.launch.GPUS; None: the simulated device
    nonzero: float = 1.0  # with `gpu`: share of elements in sizes by data
    snapshot: str | None = None  # file for PyTorch's memory visualiser
    output: str | None = None  # file for what the program prints; None: stderr
    time: str | None = None  # accelerator whose time is kept; None: no time
    trace: str | None = None  # file for a Chrome trace of the last step
