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

_version_check.check_python(built_for=_built_for.PYTHON)
_version_check.check_torch(built_for=_built_for.TORCH, built_for_cuda=_built_for.CUDA)

from lowtide import _C  # noqa: E402

if TYPE_CHECKING:
    from lowtide import losses, phantom, sequence_parallel, spmd
    from lowtide.activations import checkpoint, tag
    from lowtide.api import (
        FSDPModule,
        GradientReductionHandle,
        UnshardHandle,
        abort_step,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from lowtide.clipping import clip_grad_norm_
    from lowtide.in_backward import optimize_in_backward
    from lowtide.losses import defer_logits
    from lowtide.memory import memory_report
    from lowtide.muon import Muon
    from lowtide.optimizing import (
        local_parameters,
        offload_states,
        sharded_optimizer,
        step_on_device,
    )
    from lowtide.planning import plan
    from lowtide.policies import (
        ActivationPolicy,
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardPlacementResult,
    )
    from lowtide.saving import load, save
    from lowtide.sleeping import sleep, wake
    from lowtide.stepping import step
    from lowtide.wrapping import wrap

__version__: str = _C.build_info()["version"]

# torch.distributed is imported with the first name that needs it, not by
# `import lowtide`.
_PUBLIC = {
    "checkpoint": "lowtide.activations",
    "tag": "lowtide.activations",
    "FSDPModule": "lowtide.api",
    "GradientReductionHandle": "lowtide.api",
    "UnshardHandle": "lowtide.api",
    "abort_step": "lowtide.api",
    "fully_shard": "lowtide.api",
    "register_fsdp_forward_method": "lowtide.api",
    "share_comm_ctx": "lowtide.api",
    "clip_grad_norm_": "lowtide.clipping",
    "local_parameters": "lowtide.optimizing",
    "offload_states": "lowtide.optimizing",
    "step_on_device": "lowtide.optimizing",
    "optimize_in_backward": "lowtide.in_backward",
    "defer_logits": "lowtide.losses",
    "sharded_optimizer": "lowtide.optimizing",
    "memory_report": "lowtide.memory",
    "Muon": "lowtide.muon",
    "ActivationPolicy": "lowtide.policies",
    "CPUOffloadPolicy": "lowtide.policies",
    "DataParallelMeshDims": "lowtide.policies",
    "MixedPrecisionPolicy": "lowtide.policies",
    "OffloadPolicy": "lowtide.policies",
    "ShardPlacementResult": "lowtide.policies",
    "plan": "lowtide.planning",
    "load": "lowtide.saving",
    "save": "lowtide.saving",
    "sleep": "lowtide.sleeping",
    "wake": "lowtide.sleeping",
    "step": "lowtide.stepping",
    "wrap": "lowtide.wrapping",
}
_PUBLIC_MODULES = ("losses", "phantom", "sequence_parallel", "spmd")

__all__ = [
    "ActivationPolicy",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "abort_step",
    "checkpoint",
    "clip_grad_norm_",
    "defer_logits",
    "fully_shard",
    "load",
    "local_parameters",
    "losses",
    "memory_report",
    "offload_states",
    "optimize_in_backward",
    "phantom",
    "plan",
    "register_fsdp_forward_method",
    "save",
    "sequence_parallel",
    "share_comm_ctx",
    "sharded_optimizer",
    "sleep",
    "spmd",
    "step",
    "step_on_device",
    "tag",
    "wake",
    "wrap",
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
