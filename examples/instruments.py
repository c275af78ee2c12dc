"""What a training step costs: live bytes and traffic, the same for every system."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import lowtide
from lowtide import _C
from lowtide._base.memory import ledger

ELEMENT_SIZES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "float": 4,
    "long int": 8,
    "double": 8,
}


class Memory:
    """Bytes live on this rank during one step, from c10's own memory reports.

    The timeline counts from its start, and lowtide's own bytes from the ledger.
    What is older is added: "optimizer state" and, unless lowtide counts them,
    "parameters".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        is_lowtide = isinstance(model, lowtide.FSDPModule)
        self._parameters = () if is_lowtide else tuple(model.parameters())
        # Some systems keep buffers from one step to the next, hence the start one
        # step ahead: then these are seen too.
        self._timeline = _C.AllocationTimeline(
            device, ledger(device) if is_lowtide else None, capacity=1 << 14
        )
        self.result: dict[str, Any] | None = None

    def start(self) -> None:
        """Before the step that precedes the one to record."""
        self._timeline.start()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a step that starts and ends without gradients."""
        first = self._timeline.samples()["event"][-1]
        yield
        self._timeline.stop()

        samples = self._timeline.samples()
        begin = bisect.bisect_left(samples["event"], first)
        columns = {name: values[begin:] for name, values in samples.items()}
        del columns["event"], columns["total"]
        older = {
            "optimizer state": num_bytes(optimizer_tensors(self._optimizer)),
            "parameters": num_bytes(self._parameters),
        }
        for name, held in older.items():
            zeros = [0] * len(columns["nanoseconds"])
            columns[name] = [held + v for v in columns.get(name, zeros)]
        nanoseconds = columns.pop("nanoseconds")
        self.result = {
            "peak_bytes": max(map(sum, zip(*columns.values(), strict=True))),
            "milliseconds": [(t - nanoseconds[0]) / 1e6 for t in nanoseconds],
            "bytes": columns,
        }


class Traffic:
    """What one rank handed to the backend in one step: the backend's own calls.

    Read off the profiler ranges of gloo and NCCL, whoever issued them.  (gloo
    runs a reduce-scatter as an all-reduce; it is counted as what it is.)
    """

    def __init__(self) -> None:
        self.result: dict[str, Any] | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        activities = [ProfilerActivity.CPU]
        with profile(activities=activities, record_shapes=True, acc_events=True) as run:
            yield
        calls: Counter[str] = Counter()
        sent_bytes = 0
        for event in run.profiler.kineto_results.events():
            backend, _, collective = event.name().partition(":")
            if backend in ("gloo", "nccl"):
                calls[collective] += 1
                sent_bytes += ring_bytes(
                    collective, input_bytes(event), dist.get_world_size()
                )
        self.result = {"calls": calls, "sent_bytes": sent_bytes}


def input_bytes(event: Any) -> int:
    return sum(
        math.prod(shape) * ELEMENT_SIZES[dtype]
        for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True)
    )


def ring_bytes(collective: str, num_input_bytes: int, world_size: int) -> int:
    """What one rank sends, in a ring: the least a backend can do."""
    others = world_size - 1
    kind = collective.replace("_", "")
    if kind.startswith("allgather"):
        return num_input_bytes * others
    if kind.startswith("reducescatter"):
        return num_input_bytes * others // world_size
    if kind.startswith("allreduce"):
        return 2 * num_input_bytes * others // world_size
    raise NotImplementedError(
        "instruments: expected all-gather, reduce-scatter or all-reduce in a training "
        f"step, got {collective}. Add what a ring sends for it."
    )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes on this rank, each storage once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
