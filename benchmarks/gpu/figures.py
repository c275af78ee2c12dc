"""What measurements give, and what they are asked of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

GIB = 1 << 30
FLAGS: dict[str, tuple[str, ...]] = {"default": (), "expandable": ("--expandable",)}
Figures = dict[str, Any]  # that JSON can keep


class Programs(Protocol):
    """Runs programs of ../programs on the GPU; what each prints, read as JSON."""

    def __call__(self, name: str, *arguments: object) -> Any: ...
    def dry(self, name: str, *arguments: object) -> Any: ...
    def clocked(self, name: str, *arguments: object) -> Any: ...
    def ranks(self, world: int, name: str, *arguments: object) -> Any: ...
    def together(
        self, calls: Sequence[Sequence[object]], *, at_once: int = 3
    ) -> list[Any]: ...


def spread(ratio: Figures) -> str:
    """Of what timing.ratio gives."""
    low, high = ratio["low"], ratio["high"]
    return f"{ratio['share']} of the rounds between {low:.3f} and {high:.3f}"
