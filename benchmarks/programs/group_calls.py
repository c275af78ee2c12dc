"""What a step asks of its process group, to be asked again by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class GroupCalls(TorchDispatchMode):
    """Records the collectives under it. ``again`` issues them on tensors of the same
    shapes that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._calls.append((func, *tree_map(_like, (args, kwargs))))
        return func(*args, **kwargs)

    def again(self) -> None:
        for func, args, kwargs in self._calls:
            func(*args, **kwargs)

    def counts(self) -> dict[str, int]:
        """Tensors of each kind of call: each of a coalesced one's list."""
        found: Counter[str] = Counter()
        for func, args, _ in self._calls:
            first = args[0]
            name = func._schema.name.removeprefix("c10d::").strip("_")
            found[name] += len(first) if isinstance(first, list) else 1
        return dict(found)


def _like(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value
