"""Tensor subclasses with FSDP2's all-gather extensions, as torchao's are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

FLOAT8 = torch.float8_e4m3fn
# What the hooks were called with, by the name of the hook.
calls: list[tuple[str, dict[str, Any]]] = []


class _Wrapper(Tensor):
    """Whatever is computed with it is computed with `_data`, and wrapped again."""

    _data: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._data})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_data"])

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inner = tree_map_only(_Wrapper, lambda each: each._data, (args, kwargs))
        out = func(*inner[0], **inner[1])
        out = tree_map_only(Tensor, cls, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


class NoHooks(_Wrapper):
    """A subclass that nothing says how to gather."""


class Float8Weight(_Wrapper):
    """A master weight that travels as one byte an element and a scale a row."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        calls.append(
            ("pre", dict(mesh=mesh, size=outer_size, stride=outer_stride, to=module))
        )
        return _quantize(self._data), "metadata"

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        data, scales = gathered
        calls.append(("post", dict(dtype=param_dtype, out=out)))
        if out is not None:
            assert data.data_ptr() == out._data.data_ptr()
            return None
        full = Float8Full(data, scales, param_dtype)
        return full, (data, scales)


class Float8WeightOfMesh(Float8Weight):
    """The hook's first form, which FSDP2 still accepts."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        calls.append(("pre", dict(mesh=mesh)))
        return _quantize(self._data), "metadata"


def _quantize(data: Tensor) -> tuple[Tensor, Tensor]:
    scales = data.abs().amax(1, keepdim=True).clamp(min=1e-6) / 448
    return (data / scales).to(FLOAT8), scales


class Float8Full(Tensor):
    """What `Float8Weight` is in a forward: a weight for `F.linear` and nothing else."""

    @staticmethod
    def __new__(cls, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._data, self._scales = data, scales

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Full({tuple(self.shape)})"

    def values(self) -> Tensor:
        return (self._data.float() * self._scales).to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return _Linear.apply(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return cls(self._data, self._scales, self.dtype)
        raise NotImplementedError(f"Float8Full: {func}")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
        ctx.save_for_backward(x, weight)
        out = x @ weight.values().t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        of_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight.values(), flat.t() @ x.flatten(0, -2), of_bias


class Bf16Weight(_Wrapper):
    """Travels in bf16, padded to what FSDP2 asks of uneven shards, and becomes a plain
    parameter in bytes of its own."""

    pads = True
    copies = False  # where the dtype is the one gathered

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        if not self.pads:
            return (self._data.to(torch.bfloat16),), None
        rows = -(-outer_size[0] // mesh.size())
        padded = self._data.new_zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
        padded[: len(self._data)].copy_(self._data)
        return (padded,), None

    @torch.no_grad()  # which FSDP2 leaves to the hook
    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (data,) = gathered
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(data.flatten()[: out.numel()].view(out.shape))
            return None
        # As large as what was gathered: FSDP2 takes the first rows.
        full = data.to(param_dtype, copy=self.copies)
        return full, (data, full)


class Unpadded(Bf16Weight):
    pads = False


class Releasing(Bf16Weight):
    """Since torch 2.15: what was gathered is over when the parameter is made."""

    copies = True
    answer: Any = True

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return self.answer


def extend(model: nn.Module, kind: type[_Wrapper]) -> nn.Module:
    """Makes every matrix of a linear layer a `kind`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model
