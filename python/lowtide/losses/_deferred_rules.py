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


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    kept = torch.empty(logits.shape, device="meta").flatten(start_dim, end_dim)
    return _shaped(logits, kept.shape)


def _view(logits: DeferredLogits, *sizes: Any, **kwargs: Any) -> Any:
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if kwargs or not all(isinstance(size, int) for size in sizes):
        return Reason("its arguments")
    return _shaped(logits, torch.empty(logits.shape, device="meta").view(sizes).shape)


def _shaped(logits: DeferredLogits, shape: torch.Size) -> Any:
    if not shape or shape[-1] != logits.shape[-1]:
        return Reason(f"to shape {list(shape)}")
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
        return Reason("neither integers nor slices")
    if Ellipsis in items:
        after = len(items) - items.index(Ellipsis) - 1
        last = items[-1] if after else slice(None)
    else:
        last = items[-1] if len(items) == dims else slice(None)
    if last != slice(None):
        return Reason("of the vocabulary")
    return logits._derive(
        lambda h: h[index], lambda z: z[index], chosen=("index", str(index))
    )


def _chunk(logits: DeferredLogits, chunks: int, dim: int = 0) -> Any:
    return _parts(logits, dim, lambda t: t.chunk(chunks, dim), f"chunk {chunks}")


def _split(logits: DeferredLogits, split_size: int | list[int], dim: int = 0) -> Any:
    return _parts(
        logits, dim, lambda t: t.split(split_size, dim), f"split {split_size}"
    )


def _parts(
    logits: DeferredLogits,
    dim: int,
    cut: Callable[[Tensor], tuple[Tensor, ...]],
    name: str,
) -> Any:
    if dim in (-1, logits.dim() - 1):
        return Reason("of the vocabulary")
    hidden = cut(logits._hidden)
    return tuple(
        logits._derive(
            lambda _, i=i: hidden[i],  # type: ignore[misc]
            lambda z, i=i: cut(z)[i],  # type: ignore[misc]
            chosen=(name, dim, i),
        )
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
        return Reason("class weights")
    if size_average is not None or reduce is not None:
        return Reason("size_average or reduce")
    if reduction not in ("mean", "sum"):
        return Reason(f"reduction {reduction!r}")
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
    Tensor.logsumexp: _logsumexp,
    torch.logsumexp: _logsumexp,
    torch.special.logsumexp: _logsumexp,
}
