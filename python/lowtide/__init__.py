"""FSDP-style sharded training whose peak memory is planned instead of hoped for."""

import importlib
from typing import TYPE_CHECKING, Any

try:
    from lowtide import _built_for
except ModuleNotFoundError:
    raise ImportError(
        "lowtide: extension: expected a built package, got a source tree. "
        "Run `make dev` in the checkout, or `pip install --no-build-isolation .`."
    ) from None
from lowtide import _version_check

_version_check.check_torch(built_for=_built_for.TORCH, built_for_cuda=_built_for.CUDA)

from lowtide import _C  # noqa: E402

if TYPE_CHECKING:
    from lowtide import losses, spmd
    from lowtide.activations import checkpoint, tag
    from lowtide.api import FSDPModule, UnshardHandle, abort_step, fully_shard
    from lowtide.estimate import estimate_offload
    from lowtide.memory import MemoryReport, memory_report
    from lowtide.planning import plan
    from lowtide.policies import ActivationPolicy, MixedPrecisionPolicy

__version__: str = _C.build_info()["version"]

# torch.distributed is imported with the first name that needs it, not by
# `import lowtide`.
_PUBLIC = {
    "checkpoint": "lowtide.activations",
    "tag": "lowtide.activations",
    "FSDPModule": "lowtide.api",
    "UnshardHandle": "lowtide.api",
    "abort_step": "lowtide.api",
    "fully_shard": "lowtide.api",
    "estimate_offload": "lowtide.estimate",
    "MemoryReport": "lowtide.memory",
    "memory_report": "lowtide.memory",
    "ActivationPolicy": "lowtide.policies",
    "MixedPrecisionPolicy": "lowtide.policies",
    "plan": "lowtide.planning",
}
_PUBLIC_MODULES = ("losses", "spmd")

__all__ = [
    "ActivationPolicy",
    "FSDPModule",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "UnshardHandle",
    "abort_step",
    "checkpoint",
    "estimate_offload",
    "fully_shard",
    "losses",
    "memory_report",
    "plan",
    "spmd",
    "tag",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"lowtide.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_PUBLIC_MODULES})
