"""What is asked of the process that runs a program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """A training program, run as ``python WORDS``: a file, or ``-m`` and a module, and
    its arguments."""

    words: Sequence[str]


@dataclass(frozen=True)
class Functions:
    """``step(factory())``, then ``step`` again with the same value."""

    factory: Callable[[], Any]
    step: Callable[[Any], Any]


Program = ModelFile | Script | Functions


@dataclass(frozen=True)
class Request:
    program: Program
    world: int = 1
    rank: int = 0
    torchrun: bool = True  # a script's environment: RANK and the like are set
    steps: int = 3
    device_memory: int | None = None
    gpu: str = "h100"  # of phantom.dry.launch.GPUS
    allocator: str = ""  # as PYTORCH_ALLOC_CONF
    events: str = "immediate"  # or at_sync: when the host knows that work is done
    # Share of all elements in sizes that depend on data; None: as dry.sizes says.
    nonzero: float | None = None
    limit: float | None = None  # seconds after which it is ended
    told: str | None = None  # file for where it then was (phantom.dry.ends)
    snapshot: str | None = None  # file for PyTorch's memory visualiser
    output: str | None = None  # file for what the program prints; None: stderr
    time: bool = False  # is kept, too
    trace: str | None = None  # file for a Chrome trace of the last step
    calls: bool = False  # of NCCL are sent, too
    port: int | None = None  # of the store of all ranks, which run beside each other
