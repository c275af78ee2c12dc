"""Gathers that ``parallelize_module`` put in front of modules, done again in backward.

A parallel style redistributes a module's inputs in a forward pre-hook. Two hooks of
ours, around it, see the shard and what came of it; while the module runs, tensors that
autograd saves over the gathered bytes become claims on the shard's site.
"""

from __future__ import annotations

import dataclasses
import difflib
import weakref
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves

from lowtide import _C
from lowtide._gather.axes import axis_of
from lowtide.sequence_parallel.policy import MIN_BYTES, PREFETCH_BYTES

_WHO = "rematerialize_gathers"


def rematerialize_gathers(
    model: nn.Module,
    names: Sequence[str] | None = None,
    *,
    min_bytes: int = MIN_BYTES,
    prefetch_bytes: int = PREFETCH_BYTES,
) -> nn.Module:
    """For a model that ``parallelize_module`` has parallelised: the all-gather in front
    of a module is done again in backward instead of being saved.

    Gradients stay the same bit for bit. Each site is gathered once more in a backward,
    whatever the number of its consumers. Under activation checkpointing nothing
    changes: a recomputation has the gathered value anyway.

    Args:
        names: Patterns of module names, such as ``"layers.*.attention"``; each must be
            gathered for, or the first forward raises and names the module. None: every
            module whose inputs turn out to be gathered.
        min_bytes: Smaller gathered tensors are kept.
        prefetch_bytes: As for :class:`gather_policy`.

    Returns:
        The same model.

    Raises:
        ValueError: For a name that matches no module, or one that no parallel style
            was applied to.
    """
    chosen = _chosen(model, names)
    for name, module in chosen.items():
        gather = _ModuleGather(name, names is not None, min_bytes, prefetch_bytes)
        module.register_forward_pre_hook(gather.before, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(gather.after, with_kwargs=True)
        module.register_forward_hook(gather.end, always_call=True)
    return model


def _chosen(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    styled = {
        name: module for name, module in modules.items() if module._forward_pre_hooks
    }
    if names is None:
        if not styled:
            raise ValueError(
                f"lowtide: {_WHO}: expected a model that parallelize_module has "
                f"parallelised, got {type(model).__name__} without any parallel style. "
                "Call parallelize_module first."
            )
        return styled
    chosen = {}
    for pattern in names:
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            close = difflib.get_close_matches(pattern, list(modules), n=1, cutoff=0.4)
            hint = f"Did you mean {close[0]!r}?" if close else "See named_modules()."
            raise ValueError(
                f"lowtide: {_WHO}: expected {pattern!r} to match a module, got none. "
                f"{hint}"
            )
        for name in found:
            if name not in styled:
                raise ValueError(
                    f"lowtide: {_WHO}: expected '{name}' to have a parallel style that "
                    "gathers its input, got none. Name the module that ColwiseParallel "
                    "or PrepareModuleInput was applied to."
                )
            chosen[name] = modules[name]
    return chosen


@dataclasses.dataclass
class _Source:
    """One gathered input: its site, and how its value lies in memory."""

    site: _C.GatherSite
    dim: int
    value: weakref.ref[Tensor] | None = None

    def take(self, consumer: int) -> Tensor:
        rows = self.site.take(consumer)
        if self.dim == 0:
            return rows
        known = self.value() if self.value is not None else None
        if known is None:
            known = rows.movedim(0, self.dim).contiguous()
            self.value = weakref.ref(known)
        return known


class _Claim:
    """What autograd holds of a tensor over gathered bytes."""

    def __init__(self, source: _Source, tensor: Tensor) -> None:
        self.source = source
        self.consumer = source.site.add_consumer()
        local = _plain(tensor)
        self.geometry = (local.size(), local.stride(), local.storage_offset())
        self.spec = tensor._spec if isinstance(tensor, DTensor) else None
        weakref.finalize(self, source.site.drop_consumer, self.consumer)

    def unpack(self) -> Tensor:
        local = self.source.take(self.consumer).as_strided(*self.geometry)
        return local if self.spec is None else _dtensor(local, self.spec)


class _Kept:
    """Any other saved tensor. Hooks switch autograd's own check of versions off."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"lowtide: {_WHO}: expected a tensor that backward needs at version "
                f"{self.version}, as it was saved, got version {self.tensor._version}: "
                "something wrote to it in place. Write out of place."
            )
        return self.tensor


class _Pack:
    """Claims for tensors over gathered bytes, by storage."""

    def __init__(self) -> None:
        self.sources: dict[int, _Source] = {}

    def __call__(self, tensor: Tensor) -> _Claim | _Kept:
        source = self.sources.get(_plain(tensor).untyped_storage()._cdata)
        if source is None:
            return _Kept(tensor)
        source.site.require_unmodified()
        return _Claim(source, tensor)


class _ModuleGather:
    """The hooks on one module."""

    def __init__(
        self, name: str, required: bool, min_bytes: int, prefetch_bytes: int
    ) -> None:
        self.name, self.required = name, required
        self.min_bytes, self.prefetch_bytes = min_bytes, prefetch_bytes
        self.inputs: list[Any] = []
        self.scopes: list[saved_tensors_hooks | None] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.inputs = tree_leaves((args, kwargs))

    def after(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs, self.inputs = self.inputs, []
        gathered = list(self._gathered(inputs, tree_leaves((args, kwargs)), module))
        if self.required and not gathered:
            raise ValueError(
                f"lowtide: {_WHO}: expected an input of '{self.name}' to be gathered, "
                "got none. Remove its name, or name the module whose parallel style "
                "gathers."
            )
        large = [pair for pair in gathered if _plain(pair[1]).nbytes >= self.min_bytes]
        self.scopes.append(
            self._enter(large) if large and torch.is_grad_enabled() else None
        )

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        scope = self.scopes.pop() if self.scopes else None
        if scope is not None:
            scope.__exit__(None, None, None)

    def _gathered(
        self, inputs: list[Any], outputs: list[Any], module: nn.Module
    ) -> Iterator[tuple[Tensor, Tensor, int, DeviceMesh]]:
        """(shard, what came of it, along which dim, over which mesh)."""
        for shard, result in zip(inputs, outputs, strict=False):
            if not isinstance(shard, Tensor) or not isinstance(result, Tensor):
                continue
            mesh = _mesh(result, shard, module)
            dims = _different_dims(_plain(shard), _plain(result))
            if mesh is None or len(dims) != 1:
                continue
            (dim,) = dims
            local, whole = _plain(shard), _plain(result)
            if mesh.ndim != 1 or whole.shape[dim] != local.shape[dim] * mesh.size():
                raise ValueError(
                    f"lowtide: {_WHO}: expected the input of '{self.name}' as equal "
                    f"shards over a 1-D mesh, got {tuple(local.shape)} of "
                    f"{tuple(whole.shape)} over a mesh {tuple(mesh.shape)}. Pad the "
                    "sequence, or leave the module out."
                )
            yield shard, result, dim, mesh

    def _enter(
        self, gathered: list[tuple[Tensor, Tensor, int, DeviceMesh]]
    ) -> saved_tensors_hooks | None:
        """A new scope; None inside one of ours, which then knows the inputs, and
        under other hooks, which hold what is saved."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, scope = top[0] if top else None, None
        if not isinstance(pack, _Pack):
            if _C.active_gather_hooks() == "foreign":
                return None
            pack = _Pack()
            scope = saved_tensors_hooks(pack, lambda saved: saved.unpack())
        for shard, result, dim, mesh in gathered:
            local, whole = _plain(shard), _plain(result)
            site = _C.GatherSite(
                axis_of(mesh.get_group(), whole.device),
                local.movedim(dim, 0),
                self.name,
                self.prefetch_bytes,
            )
            site.watch(whole, result)
            pack.sources[whole.untyped_storage()._cdata] = _Source(site, dim)
        if scope is not None:
            scope.__enter__()
        return scope


def _plain(tensor: Tensor) -> Tensor:
    """This rank's bytes."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _dtensor(local: Tensor, spec: DTensorSpec) -> Tensor:
    return DTensor(local, spec, requires_grad=False)


def _mesh(result: Tensor, shard: Tensor, module: nn.Module) -> DeviceMesh | None:
    for tensor in (result, shard, *module.parameters()):
        if isinstance(tensor, DTensor):
            return tensor.device_mesh
    return None


def _different_dims(a: Tensor, b: Tensor) -> list[int]:
    if a.dim() != b.dim():
        return []
    return [dim for dim in range(a.dim()) if a.shape[dim] != b.shape[dim]]
