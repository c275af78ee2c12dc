"""What a program has replaced of FSDP2's classes, as some do to shard what FSDP2 does
not: lowtide has its own engine, and calls none of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from lowtide._sharding.fsdp_module import FSDPModule

_CLASSES: tuple[type, ...] = (FSDPParam, FSDPParamGroup, FSDPState, TorchFSDPModule)


class Replaced:
    """Since it was made."""

    def __init__(self) -> None:
        self._before = {each: dict(vars(each)) for each in _CLASSES}

    def methods(self) -> list[str]:
        """Of methods, added ones too: their names, and who put them there."""
        return [text for each in _CLASSES for text in self._of(each)]

    def _of(self, of: type) -> Iterator[str]:
        for name, now in list(vars(of).items()):
            if now is self._before[of].get(name) or not _is_code(now):
                continue
            if inspect.getattr_static(FSDPModule, name, None) is now:
                continue  # lowtide's modules have it from FSDP2's
            function = now.fget if isinstance(now, property) else now
            module = getattr(function, "__module__", "?")
            what = getattr(function, "__qualname__", repr(function))
            yield f"{of.__name__}.{name} (by {module}.{what})"


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)
