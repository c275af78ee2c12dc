"""Figures beside what we set out to reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from case import Row, rows_of

NAME = "gpu_check"
row = rows_of(NAME)


@dataclass(frozen=True)
class Bar:
    """A figure may be at most ``limit``."""

    limit: float

    def met(self, value: float) -> bool:
        return value <= self.limit


OF_FSDP2_RESERVED = Bar(0.95)
RESERVED_OF_ALLOCATED = Bar(1.05)
DEFERRED_OF_FSDP2 = Bar(0.65)
FLAT_OF_CAT = Bar(0.88)
CASE2_DEVICE_GIB = Bar(5.6)
OPTIMIZER_US = Bar(8)
STEP_TIME = Bar(1.02)
NONE = Bar(0)  # errors, differences
NO_WORSE = Bar(1)
# docs/losses.md, of linear_cross_entropy
LOSS_ERROR = Bar(1e-6)
GRADIENT_ERROR = {"fp32": Bar(3e-6), "bf16": Bar(2**-6), "fp16": Bar(2**-9)}


def with_bar(
    quantity: str,
    value: float,
    bar: Bar,
    unit: str = "",
    note: str = "",
    system: str = "lowtide",
) -> Iterator[Row]:
    """The figure, its bar, and whether it is met, as columns of one line. What is
    compared is the figure, not what a table rounds it to."""
    yield row(system, quantity, value, unit, "measured", note)
    yield row("bar", quantity, bar.limit, unit, "arithmetic")
    yield row("met", quantity, bar.met(value), "", "measured")


def missed(rows: Iterable[Row]) -> list[str]:
    """Quantities above their bar."""
    return [r.quantity for r in rows if r.system == "met" and r.value is False]
