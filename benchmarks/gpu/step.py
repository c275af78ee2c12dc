"""What gpu_check does one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from case import Row
from processes import Processes

Figures = dict[str, Any]


class Step(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def seconds(self) -> int:
        """What it takes on an H100 machine, roughly."""

    def run(self, processes: Processes) -> Figures:
        """Figures that JSON can keep. {"missing": why}: it needs what is not there."""

    def stands(self, figures: Figures) -> bool:
        """Whether what it made when it gave ``figures`` is still there."""

    def rows(self, figures: Figures) -> Iterator[Row]:
        """Of figures that are not missing."""
