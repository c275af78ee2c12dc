"""What is done to deferred logits without their numbers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.losses._deferred_logits import (
    HALF,
    RULES,
    DeferredLogits,
    Reason,
    itself,
    visiting,
    widens,
)
from lowtide.losses._vocabulary_chunks import Saved


def _as(logits: DeferredLogits, dtype: torch.dtype) -> Any:
    if dtype == logits.dtype:
        return logits
    if not widens(logits.dtype, dtype):
        return Reason(f"to {dtype}")
    return logits._derive(itself, lambda z: z.to(dtype), dtype)


def _float(logits: DeferredLogits, **kwargs: Any) -> Any:
    return Reason("its arguments") if kwargs else _as(logits, torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if kwargs.pop("copy", False):
        return Reason("a copy")
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    if layout is not None or (device is not None and device != logits.device):
        return Reason(f"to {device or layout}")
    return _as(logits, dtype or logits.dtype)


def _contiguous(logits: DeferredLogits, **kwargs: Any) -> Any:
    return Reason("its arguments") if kwargs else logits


def _reshaped(name: str) -> Callable[..., Any]:
    """All tokens in another shape."""

    def rule(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
            return Reason("its arguments")
        shape = getattr(_like(logits), name)(*args, **kwargs).shape
        if not shape or shape[-1] != logits.shape[-1]:
            return Reason(f"to shape {list(shape)}")
        return logits._derive(
            lambda h: h.reshape(*shape[:-1], h.shape[-1]), lambda z: z.reshape(shape)
        )

    return rule


def _reshaped_as(logits: DeferredLogits, other: Tensor) -> Any:
    return _reshaped("view")(logits, other.shape)


def _parted(name: str) -> Callable[..., Any]:
    """Some tokens or several parts, or all in another order: with the classes whole,
    the same is done to hidden."""

    def rule(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
            return Reason("a tensor as its argument")

        def cut(tensor: Tensor) -> Any:
            return getattr(tensor, name)(*args, **kwargs)

        probe, chosen = cut(_like(logits)), (name, str(args), str(kwargs))
        if isinstance(probe, Tensor):
            if not _whole_classes(logits, probe):
                return Reason("of the vocabulary")
            return logits._derive(cut, cut, chosen=chosen)
        if not all(_whole_classes(logits, each) for each in probe):
            return Reason("of the vocabulary")
        return tuple(
            logits._derive(
                lambda _, part=part: part,  # type: ignore[misc]
                lambda z, i=i: cut(z)[i],  # type: ignore[misc]
                chosen=(*chosen, i),
            )
            for i, part in enumerate(cut(logits._hidden))
        )

    return rule


def _iter(logits: DeferredLogits) -> Any:
    parts = _parted("unbind")(logits)
    return parts if isinstance(parts, Reason) else iter(parts)


def _getitem(logits: DeferredLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_index, items)):
        return Reason("neither integers, slices nor tensors of them")
    # Tensors take as many dimensions as empty slices, which no vocabulary survives.
    probe = (part for item in items for part in _slices_like(item))
    if not _whole_classes(logits, _like(logits)[tuple(probe)]):
        return Reason("of the vocabulary")
    chosen: Any = ("index", str(index))
    if any(isinstance(item, Tensor) for item in items):
        # The logits, if they are made, are taken by what the index says now.
        items = tuple(i.clone() if isinstance(i, Tensor) else i for i in items)
        chosen = object()  # nobody knows whether another index is equal
    return logits._derive(lambda h: h[items], lambda z: z[items], chosen=chosen)


def _is_index(item: Any) -> bool:
    if isinstance(item, slice):
        bounds = (item.start, item.stop, item.step)
        return all(bound is None or type(bound) is int for bound in bounds)
    if type(item) is Tensor:
        return item.dtype in (torch.bool, torch.int64)
    return item is None or item is Ellipsis or type(item) is int


def _slices_like(item: Any) -> tuple[Any, ...]:
    if not isinstance(item, Tensor):
        return (item,)
    return (slice(0, 0),) * (item.dim() if item.dtype == torch.bool else 1)


def _like(logits: DeferredLogits) -> Tensor:
    return torch.empty(logits.shape, device="meta")


def _whole_classes(logits: DeferredLogits, view: Tensor) -> bool:
    """Whether the last dimension of this view of :func:`_like` is the vocabulary."""
    size = logits.shape[-1]
    return size > 1 and view.shape[-1:] == (size,) and view.stride(-1) == 1


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
        return Reason("class weights")
    if size_average is not None or reduce is not None:
        return Reason("size_average or reduce")
    if reduction not in ("mean", "sum", "none"):
        return Reason(f"reduction {reduction!r}")  # torch's error
    if logits.dim() != 2:
        return Reason(f"classes in dimension 1 of {list(logits.shape)}")
    if type(target) is not Tensor or target.dtype != torch.int64:
        return Reason("targets that are no int64 class indices")
    if target.shape != logits.shape[:1]:
        return Reason(f"targets of shape {list(target.shape)}")
    with torch.set_grad_enabled(logits.requires_grad and torch.is_grad_enabled()):
        loss, top, total = logits._family.call.loss(
            logits._hidden,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    logits._family.sums[logits._tokens] = (top, total)
    # As autocast has cross_entropy: in fp32.
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in HALF:
        return loss
    return loss.to(logits.dtype)


def _logsumexp(
    logits: DeferredLogits,
    dim: int | tuple[int, ...],
    keepdim: bool = False,
    **kwargs: Any,
) -> Any:
    """Of the loss of the same tokens, if there is one: its pass and its backward."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if kwargs or dims not in ((-1,), (logits.dim() - 1,)):
        return Reason("not along the vocabulary alone")
    family = logits._family
    grad = logits.requires_grad and torch.is_grad_enabled()
    sums = family.sums.get(logits._tokens)
    if sums is None or (grad and not sums[1].requires_grad):
        if grad and family.call.has_one_backward:
            return Reason("not of the tokens of a cross entropy before it")
        with torch.set_grad_enabled(grad):
            sums = family.call.sums(logits._hidden)
        family.sums[logits._tokens] = sums
    top, total = sums
    with torch.set_grad_enabled(grad):
        lse = Saved(top, visiting(total, [logits._hidden])).logsumexp()
        lse = lse.view(*logits.shape[:-1], *((1,) if keepdim else ()))
        device = logits.device.type
        # Autocast has it in fp32, but for a CPU's.
        if torch.is_autocast_enabled(device) and device != "cpu":
            return lse
        return lse.to(logits.dtype)


RULES |= {
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    Tensor.view_as: _reshaped_as,
    Tensor.reshape_as: _reshaped_as,
    Tensor.__getitem__: _getitem,
    Tensor.__iter__: _iter,
    F.cross_entropy: _cross_entropy,
    Tensor.logsumexp: _logsumexp,
    torch.logsumexp: _logsumexp,
    torch.special.logsumexp: _logsumexp,
}
RULES |= {
    getattr(of, name): rule(name)
    for rule, names in (
        (_reshaped, ("flatten", "reshape", "squeeze", "unflatten", "unsqueeze")),
        (_parted, ("chunk", "narrow", "permute", "select", "split")),
        (_parted, ("tensor_split", "transpose", "unbind")),
    )
    for name in names
    for of in (Tensor, torch)
}
RULES[Tensor.view] = _reshaped("view")
