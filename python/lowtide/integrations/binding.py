"""``bind``: lowtide's ``fully_shard`` wherever torch's stands.

Only the function changes places. Its companions are torch's own in lowtide, too
(``MixedPrecisionPolicy``, ``OffloadPolicy``, ``CPUOffloadPolicy``,
``register_fsdp_forward_method``, ``share_comm_ctx``), and what lowtide returns is an
instance of torch's ``FSDPModule`` and ``UnshardHandle``: checks of frameworks hold.
So does the private one of FSDP2's state, which is bound beside it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.fsdp._fully_shard import _fully_shard as _torch

from lowtide import api
from lowtide._base import holders
from lowtide._sharding.unit import unit_state

# Both of torch's paths, and the modules behind them.
TORCH_PATHS = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)

_of_torch: Any = _torch.fully_shard
_state_of_torch: Callable[..., Any] = _fsdp_state._get_module_fsdp_state


class Binding:
    """Stands from :func:`bind` on; as a context manager until its end.

    ``places`` are the modules, by name, whose ``fully_shard`` was torch's.
    """

    def __init__(self, called: Callable[..., Any]) -> None:
        self._ours = called
        self.places = sorted(holders.replace(_of_torch, called))
        holders.replace(_state_of_torch, _get_module_fsdp_state)

    def undo(self) -> None:
        """Puts torch's function back, also into modules that were imported since. What
        lowtide has sharded stays so."""
        holders.replace(self._ours, _of_torch)
        holders.replace(_get_module_fsdp_state, _state_of_torch)

    def users(self) -> list[str]:
        """The modules outside of torch that hold the function by now."""
        places = {module for module, _ in holders.holders(self._ours)}
        return sorted(name for name in places if not holders.is_within(name, "torch"))

    def __enter__(self) -> Binding:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.undo()


def bind(around: Callable[..., Any] | None = None) -> Binding:
    """Puts lowtide's ``fully_shard`` in the place of torch's: in both of its modules
    and in every module that holds it already. What is imported later finds it there.

    Not thread-safe: no other thread may import meanwhile. A function that holds torch's
    in a closure, a partial or a class is not found; bind before making it.

    ``around``: called instead with lowtide's function and the call's arguments.
    """

    @functools.wraps(api.fully_shard)
    def fully_shard(*args: Any, **settings: Any) -> Any:
        if around is None:
            return api.fully_shard(*args, **settings)
        return around(api.fully_shard, *args, **settings)

    # It finds what either has attached: torch's own function, where a program has
    # hidden it, reads it by the name that is bound here.
    fully_shard.state = _of_torch.state
    for name in TORCH_PATHS:
        importlib.import_module(name)
    return Binding(fully_shard)


def is_bound() -> bool:
    """Whether lowtide's function stands in the place of torch's."""
    return _torch.fully_shard is not _of_torch


def _get_module_fsdp_state(module: nn.Module) -> Any:
    """By which programs ask whether a module is sharded already."""
    return unit_state(module) or _state_of_torch(module)
