"""Lightning: a strategy that gives ``configure_model`` lowtide's ``fully_shard``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowtide import api
from lowtide.integrations.all_or_nothing import guard
from lowtide.integrations.binding import bind

__all__ = ["strategy_class"]

# One code base under two names, whose classes do not know each other.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def strategy_class(theirs: type[Any]) -> type[Any]:
    """``LowtideStrategy`` of this module, made from the ``ModelParallelStrategy`` of
    either of Lightning's packages; the module's own is of the one that is imported."""

    class LowtideStrategy(theirs):
        """Lightning's ``ModelParallelStrategy``, its arguments included, in which
        ``configure_model`` shards with lowtide, whichever ``fully_shard`` it calls.

        ``all_or_nothing=True``: optimizer steps, which Lightning calls forward and
        backward in, happen on all ranks or on none, see
        :mod:`lowtide.integrations.all_or_nothing`.

        Raises:
            ValueError: If ``configure_model`` leaves a model that lowtide has not
                sharded.
        """

        def __init__(
            self, *args: Any, all_or_nothing: bool = False, **settings: Any
        ) -> None:
            super().__init__(*args, **settings)
            self._all_or_nothing = all_or_nothing

        @contextmanager
        def model_sharded_context(self) -> Iterator[None]:
            with bind(), super().model_sharded_context():
                yield

        def setup(self, trainer: Any) -> None:
            modules = self.model.modules()
            if not any(isinstance(module, api.FSDPModule) for module in modules):
                raise ValueError(
                    "lowtide: integrations.lightning: expected configure_model of "
                    f"{type(self.lightning_module).__name__} to call fully_shard, got "
                    "a model that lowtide has not sharded. Call it there, on the "
                    "blocks and then on the model."
                )
            super().setup(trainer)
            if self._all_or_nothing:
                for optimizer in self.optimizers:
                    guard(optimizer)

    LowtideStrategy.__module__ = __name__
    return LowtideStrategy


def __getattr__(name: str) -> Any:
    if name != "LowtideStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    strategies = importlib.import_module(f"{_package()}.strategies")
    value = strategy_class(strategies.ModelParallelStrategy)
    globals()[name] = value
    return value


def _package() -> str:
    found = [name for name in _PACKAGES if name in sys.modules]
    if not found:
        found = [n for n in _PACKAGES if importlib.util.find_spec(n.split(".")[0])]
    if len(found) != 1:
        raise ImportError(
            "lowtide: integrations.lightning: expected lightning or pytorch_lightning, "
            f"got {' and '.join(found) or 'none'}. Import the one you use first, or "
            "write strategy_class(ModelParallelStrategy) with its class."
        )
    return found[0]
