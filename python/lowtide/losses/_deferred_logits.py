"""A tensor that stands for the logits of a head that has not been multiplied yet.

It is seen by `__torch_function__` and so before autograd. Two things are true of every
one: ``hidden``, whose rows times the head are its rows, and how to get its numbers from
those of the head's whole output. What only chooses or groups tokens, or widens the
dtype, is done to ``hidden`` and gives another such tensor; `F.cross_entropy` becomes
the loss of ``hidden``; everything else gets the numbers.
"""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map_only

_HALF = (torch.bfloat16, torch.float16)
_CAST = "ToCopyBackward0"  # of a `to` that C++ called
_MAKE_BEFORE = (
    "Make the logits before (logits = logits.clone()), or do not defer this head's."
)
# Folders whose frames are not the place that asked.
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class HeadCall(Protocol):
    """One call of a head, not made yet."""

    def require_unchanged(self) -> None: ...

    def say_made(self, what: str) -> None: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def loss(self, hidden: Tensor, targets: Tensor, **settings: Any) -> Tensor: ...


class _Family:
    """The logits of one call and what was derived of them: they are made together."""

    def __init__(self, call: HeadCall) -> None:
        self.call = call
        self.logits: Tensor | None = None
        self.version = 0
        self.members: weakref.WeakSet[DeferredLogits] = weakref.WeakSet()


class DeferredLogits(Tensor):
    """See this file's beginning. ``hidden``: [..., D] for logits of [..., V]."""

    _family: _Family
    _hidden: Tensor
    _parent: "DeferredLogits | None"
    _of_parent: Callable[[Tensor], Tensor]
    _copies: bool
    _real: Tensor | None
    _node: Any

    @staticmethod
    def of_call(
        call: HeadCall,
        hidden: Tensor,
        vocab_size: int,
        dtype: torch.dtype,
        requires_grad: bool,
    ) -> "DeferredLogits":
        """The logits ``call.logits(hidden)``, [..., vocab_size]."""
        return _stand_in(_Family(call), hidden, vocab_size, dtype, requires_grad)

    def _derive(
        self,
        of_hidden: Callable[[Tensor], Tensor],
        of_logits: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
    ) -> "DeferredLogits":
        derived = _stand_in(
            self._family,
            of_hidden(self._hidden),
            self.shape[-1],
            dtype or self.dtype,
            self.requires_grad and torch.is_grad_enabled(),
        )
        derived._parent, derived._of_parent = self, of_logits
        derived._copies = dtype is not None
        return derived

    def _cast(self, dtype: torch.dtype) -> "DeferredLogits":
        """Below autograd, which gives it a node that leads to this one's."""
        cast = _made(self._family, self._hidden, self.shape[-1], dtype)
        cast._parent, cast._copies = self, True
        cast._of_parent, cast._node = lambda z: z.to(dtype), None
        return cast

    def _require_own_graph(self) -> None:
        """What a custom function returned has its node, which would be left out."""
        with torch._C.DisableTorchFunctionSubclass():
            node = self.grad_fn
        if node is not self._node and (node is None or node.name() != _CAST):
            raise RuntimeError(
                "lowtide: deferred logits: expected them as the head returned them, "
                f"got them from {node.name() if node else 'detach'}. {_MAKE_BEFORE}"
            )

    def _numbers(self) -> Tensor:
        """What this stands for: made once, with its graph."""
        self._require_own_graph()
        family = self._family
        if family.logits is None:
            first = self
            while first._parent is not None:
                first = first._parent
            family.logits = family.call.logits(_through(first._hidden, family.members))
            family.version = _version(family.logits)
        if self._real is None:
            if self._parent is None:
                self._real = family.logits
            else:
                if self._copies and _version(family.logits) != family.version:
                    raise RuntimeError(
                        "lowtide: deferred logits: expected a copy of them to be "
                        "looked at before they are written to in place, got it after. "
                        "Look at it before, or write out of place."
                    )
                of_parent = self._parent._numbers()
                with torch.set_grad_enabled(self.requires_grad):
                    self._real = self._of_parent(of_parent)
        return self._real

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        reason = ""
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, DeferredLogits) and first._family.logits is None:
            if (rule := _RULES.get(func)) is not None:
                first._require_own_graph()
                first._family.call.require_unchanged()
                rest = {k: v for k, v in kwargs.items() if k != "input"}
                deferred = rule(first, *args[1:], **rest)
                if not isinstance(deferred, _Reason):
                    return deferred
                reason = deferred
        name = resolve_name(func) or getattr(func, "__name__", str(func))

        def numbers(deferred: DeferredLogits) -> Tensor:
            if deferred._family.logits is None:
                said = f"{name} ({reason})" if reason else name
                deferred._family.call.say_made(said)
            return deferred._numbers()

        args, kwargs = tree_map_only(DeferredLogits, numbers, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Comes from C++, and below autograd: numbers made here have no graph."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and set(kwargs) == {"dtype"}:
            if _widens(args[0].dtype, kwargs["dtype"]):
                return args[0]._cast(kwargs["dtype"])
        if torch.is_grad_enabled() and any(
            isinstance(arg, DeferredLogits) and arg.requires_grad for arg in args
        ):
            raise RuntimeError(
                "lowtide: deferred logits: expected operations called from Python, "
                f"got {func} from C++, whose gradient would be lost. {_MAKE_BEFORE}"
            )

        def numbers(deferred: DeferredLogits) -> Tensor:
            if deferred._family.logits is None:
                deferred._family.call.say_made(str(func))
            return deferred._numbers().detach()

        args, kwargs = tree_map_only(DeferredLogits, numbers, (args, kwargs))
        return func(*args, **kwargs)


def warn_made(what: str) -> None:
    """Once per place, as Python's warnings are: who asked for the logits."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"lowtide: deferred logits: {what} needs the logits, which are made now. "
        "docs/losses.md lists what keeps them deferred.",
        stacklevel=level,
    )


# -- autograd -------------------------------------------------------------------------


class _StandIn(torch.autograd.Function):
    """(stand-in, hidden): hooks on the node of the stand-in, such as those of a sharded
    model on what its forward returns, run when the gradient of hidden comes by."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, make: Callable[[Tensor], DeferredLogits]
    ) -> tuple[DeferredLogits, Tensor]:
        ctx.set_materialize_grads(False)
        return make(hidden), hidden.view_as(hidden)

    @staticmethod
    def backward(
        ctx: FunctionCtx, of_logits: Tensor | None, of_hidden: Tensor | None
    ) -> tuple[Tensor | None, None]:
        if of_logits is not None:
            raise RuntimeError(
                "lowtide: deferred logits: expected gradients of what was made of them "
                "by operations, got some from a custom autograd.Function (as of "
                "DistributedDataParallel with find_unused_parameters or static_graph). "
                f"{_MAKE_BEFORE}"
            )
        return of_hidden, None


class _Through(torch.autograd.Function):
    """``hidden``, and in backward a visit without a gradient to the other inputs: the
    nodes of stand-ins whose numbers come from the whole logits."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, *visited: Tensor) -> Tensor:
        ctx.visited = len(visited)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in range(ctx.visited))


def _through(hidden: Tensor, members: Any) -> Tensor:
    visited = [
        member._hidden
        for member in members
        if member._parent is not None and member._hidden.requires_grad
    ]
    if not visited or not torch.is_grad_enabled():
        return hidden
    return _Through.apply(hidden, *visited)


def _stand_in(
    family: _Family,
    hidden: Tensor,
    vocab_size: int,
    dtype: torch.dtype,
    requires_grad: bool,
) -> DeferredLogits:
    if not (requires_grad and hidden.requires_grad):
        logits = _made(family, hidden, vocab_size, dtype)
        with torch._C.DisableTorchFunctionSubclass():
            logits.requires_grad_(requires_grad)
        return logits
    make = functools.partial(_made, family, vocab_size=vocab_size, dtype=dtype)
    logits, logits._hidden = _StandIn.apply(hidden, make)
    with torch._C.DisableTorchFunctionSubclass():
        logits._node = logits.grad_fn
    return logits


def _made(
    family: _Family, hidden: Tensor, vocab_size: int, dtype: torch.dtype
) -> DeferredLogits:
    logits = Tensor._make_wrapper_subclass(
        DeferredLogits,
        (*hidden.shape[:-1], vocab_size),
        dtype=dtype,
        device=hidden.device,
    )
    logits._family, logits._hidden, logits._parent = family, hidden, None
    logits._of_parent, logits._copies, logits._real = _itself, False, None
    logits._node = None
    family.members.add(logits)
    return logits


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# -- what keeps logits deferred -------------------------------------------------------


class _Reason(str):
    """Why an operation that may be deferred is not, this time."""


def _as(logits: DeferredLogits, dtype: torch.dtype) -> Any:
    if dtype == logits.dtype:
        return logits
    if not _widens(logits.dtype, dtype):
        return _Reason(f"to {dtype}")
    return logits._derive(_itself, lambda z: z.to(dtype), dtype)


def _widens(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether the loss of logits rounded to ``old`` is that of them in ``new``."""
    return old in _HALF and new == torch.float32


def _float(logits: DeferredLogits, **kwargs: Any) -> Any:
    return _Reason("its arguments") if kwargs else _as(logits, torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if kwargs.pop("copy", False):
        return _Reason("a copy")
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    if layout is not None or (device is not None and device != logits.device):
        return _Reason(f"to {device or layout}")
    return _as(logits, dtype or logits.dtype)


def _contiguous(logits: DeferredLogits, **kwargs: Any) -> Any:
    return _Reason("its arguments") if kwargs else logits


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    kept = torch.empty(logits.shape, device="meta").flatten(start_dim, end_dim)
    return _shaped(logits, kept.shape)


def _view(logits: DeferredLogits, *sizes: Any, **kwargs: Any) -> Any:
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if kwargs or not all(isinstance(size, int) for size in sizes):
        return _Reason("its arguments")
    return _shaped(logits, torch.empty(logits.shape, device="meta").view(sizes).shape)


def _shaped(logits: DeferredLogits, shape: torch.Size) -> Any:
    if not shape or shape[-1] != logits.shape[-1]:
        return _Reason(f"to shape {list(shape)}")
    return logits._derive(
        lambda h: h.reshape(*shape[:-1], h.shape[-1]), lambda z: z.reshape(shape)
    )


def _getitem(logits: DeferredLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    dims = logits.dim()
    if not all(
        item is Ellipsis or isinstance(item, slice) or type(item) is int
        for item in items
    ):
        return _Reason("neither integers nor slices")
    if Ellipsis in items:
        after = len(items) - items.index(Ellipsis) - 1
        last = items[-1] if after else slice(None)
    else:
        last = items[-1] if len(items) == dims else slice(None)
    if last != slice(None):
        return _Reason("of the vocabulary")
    return logits._derive(lambda h: h[index], lambda z: z[index])


def _chunk(logits: DeferredLogits, chunks: int, dim: int = 0) -> Any:
    return _parts(logits, dim, lambda t: t.chunk(chunks, dim))


def _split(logits: DeferredLogits, split_size: int | list[int], dim: int = 0) -> Any:
    return _parts(logits, dim, lambda t: t.split(split_size, dim))


def _parts(
    logits: DeferredLogits, dim: int, cut: Callable[[Tensor], tuple[Tensor, ...]]
) -> Any:
    if dim in (-1, logits.dim() - 1):
        return _Reason("of the vocabulary")
    hidden = cut(logits._hidden)
    return tuple(
        logits._derive(lambda _, i=i: hidden[i], lambda z, i=i: cut(z)[i])  # type: ignore[misc]
        for i in range(len(hidden))
    )


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if weight is not None:
        return _Reason("class weights")
    if size_average is not None or reduce is not None:
        return _Reason("size_average or reduce")
    if reduction not in ("mean", "sum"):
        return _Reason(f"reduction {reduction!r}")
    if logits.dim() != 2:
        return _Reason(f"classes in dimension 1 of {list(logits.shape)}")
    if type(target) is not Tensor or target.dtype != torch.int64:
        return _Reason("targets that are no int64 class indices")
    if target.shape != logits.shape[:1]:
        return _Reason(f"targets of shape {list(target.shape)}")
    with torch.set_grad_enabled(logits.requires_grad and torch.is_grad_enabled()):
        loss = logits._family.call.loss(
            logits._hidden,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    # As autocast has cross_entropy: in fp32.
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in _HALF:
        return loss
    return loss.to(logits.dtype)


_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.__getitem__: _getitem,
    Tensor.chunk: _chunk,
    torch.chunk: _chunk,
    Tensor.split: _split,
    torch.split: _split,
    F.cross_entropy: _cross_entropy,
}

# What is known without the numbers.
_METADATA: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf"),
            *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
            *("is_mps", "is_xpu", "is_mkldnn", "itemsize", "nbytes"),
            *("grad_fn", "output_nr"),
        )
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension),
    *(Tensor.element_size, Tensor.get_device, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.is_inference, Tensor.__len__, Tensor.stride),
    *(Tensor.is_contiguous, Tensor.storage_offset),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference),
}
