"""What a benchmark case is, and the rows it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# measured   run here, by the method the case describes
# simulated  run on a stand-in for the real thing
# arithmetic computed from shapes
# published  a figure of the report the case comes from
# missing    could not be obtained; the note says why
KINDS = ("measured", "simulated", "arithmetic", "published", "missing")

Value = float | int | bool | None


@dataclass(frozen=True)
class Row:
    """One figure: ``quantity`` of ``system``. ``unit`` is "" for numbers without."""

    case: str
    system: str
    quantity: str
    value: Value
    unit: str
    kind: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {KINDS}, got {self.kind!r}.")
        if (self.value is None) != (self.kind == "missing"):
            raise ValueError(
                f"value: expected none exactly where the kind is missing, got "
                f"{self.value!r} with {self.kind!r}."
            )


@dataclass(frozen=True)
class Case:
    name: str
    describe: str  # one line
    how: str  # how the figures are obtained; Markdown
    run: Callable[[], Sequence[Row]]
    # Those of the rows that are the same whenever they are computed, in parts that can
    # be computed alone; by name. Some raise Absent.
    parts: Mapping[str, Callable[[], Iterable[Row]]] = field(default_factory=dict)
    headlines: tuple[str, ...] = ()  # quantities for the README
    only_by_name: str = ""  # why a run of all cases leaves it out

    def part_in_turn(self, turn: int) -> str:
        """Counting turns up comes by every part."""
        names = list(self.parts)
        return names[turn % len(names)]

    def rows(self) -> list[Row]:
        rows = list(self.run())
        for row in rows:
            assert row.case == self.name, row
        return rows


def rows_of(case: str) -> Callable[..., Row]:
    """A shorter ``Row`` for the rows of one case."""

    def row(
        system: str, quantity: str, value: Any, unit: str, kind: str, note: str = ""
    ) -> Row:
        return Row(case, system, quantity, value, unit, kind, note)

    return row
