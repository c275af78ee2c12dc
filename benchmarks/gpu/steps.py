"""The steps of gpu_check in their order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import measurements as m
from building import Build, CppTests, Sanitizer
from case import Row
from scale import Scale


class Step(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def seconds(self) -> int: ...
    def run(self) -> dict[str, Any]: ...
    def rows(self, figures: dict[str, Any]) -> Iterator[Row]: ...


def steps(scale: Scale) -> list[Step]:
    """Seconds are estimates for an H100 and 16 cores; no run has shown them."""
    return [Build(), CppTests(), Sanitizer(), *measurements(scale)]


def measurements(scale: Scale) -> list[m.Measurement]:
    found = [
        m.Measurement(
            f"memory-{checkpoint}",
            f"peaks of the slice at world 8, checkpoint {checkpoint}",
            35,
            scale,
            partial(m.llama_memory, checkpoint),
            partial(m.llama_memory_rows, checkpoint),
        )
        for checkpoint in m.CHECKPOINTS
    ]
    rest = (
        ("bits", "losses and parameters beside FSDP2's", 25, m.bits, m.bits_rows),
        (
            "speed",
            "step time of the slice, NCCL",
            35,
            m.llama_speed,
            m.llama_speed_rows,
        ),
        ("case1", "flat gradients", 45, m.flat_gradients, m.flat_gradients_rows),
        ("case2", "offload of the residual", 85, m.residual, m.residual_rows),
        ("links", "bandwidth to and from the host", 10, m.links, m.links_rows),
        ("kernels", "bandwidth of the operators", 10, m.kernels, m.kernels_rows),
        ("host", "host time per unit", 20, m.host_units, m.host_units_rows),
        ("replay", "allocator model and ledger", 35, m.replay, m.replay_rows),
    )
    found += [
        m.Measurement(name, what, seconds, scale, measure, rows)
        for name, what, seconds, measure, rows in rest
    ]
    return found
