"""Operators of the loss for a weight that is a tensor.

torch.compile does not look into an operator: a compiled model keeps the buffers and the
order of work of the eager one, in one graph.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.library import custom_op

from lowtide.losses._autograd import refuse_create_graph
from lowtide.losses._checks import check_targets
from lowtide.losses._objective import Objective
from lowtide.losses._rows import TensorRows, accumulate_dtype
from lowtide.losses._sizes import (
    WHOLE_VOCABULARY_TILE_BYTES,
    token_chunk_or_default,
    vocab_chunk_or_default,
)
from lowtide.losses._tiles import scale_in_place
from lowtide.losses._token_chunks import loss_and_gradients
from lowtide.losses._vocabulary_chunks import (
    Batch,
    Saved,
    gradients_by_rows,
    loss_by_rows,
)


@custom_op("lowtide::linear_cross_entropy", mutates_args=())
def loss_by_vocabulary(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    compute_dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    token_chunk: int | None,
    vocab_chunk: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, 0-dim or [tokens], and `Saved`."""
    check_targets(targets, len(weight), ignore_index)
    rows, tokens = _chunks(targets, weight, compute_dtype, token_chunk, vocab_chunk)
    objective = Objective(ignore_index, label_smoothing, z_loss, reduction)
    loss, saved = loss_by_rows(Batch(hidden, targets, bias), rows, objective, tokens)
    return loss, *saved


@loss_by_vocabulary.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    compute_dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    *settings: object,
) -> tuple[Tensor, Tensor, Tensor]:
    top = hidden.new_empty(targets.shape, dtype=accumulate_dtype(compute_dtype))
    loss = top.new_empty(targets.shape if reduction == "none" else ())
    return loss, top, torch.empty_like(top)


@custom_op("lowtide::linear_cross_entropy_backward", mutates_args=())
def _gradients(
    grad_loss: Tensor,
    grad_total: Tensor | None,
    top: Tensor,
    total: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    compute_dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    token_chunk: int | None,
    vocab_chunk: int | None,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; empty where none is asked for."""
    rows, tokens = _chunks(targets, weight, compute_dtype, token_chunk, vocab_chunk)
    gradients = gradients_by_rows(
        grad_loss,
        Saved(top, total),
        Batch(hidden, targets, bias),
        rows,
        Objective(ignore_index, label_smoothing, z_loss, reduction),
        tokens,
        (for_hidden, for_weight, for_bias),
        grad_total,
    )
    return _or_empty(gradients, hidden)


@_gradients.register_fake
def _(
    grad_loss: Tensor,
    grad_total: Tensor | None,
    top: Tensor,
    total: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *settings: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(hidden, weight, bias, settings[-3:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, top, total = output
    _have_no_gradient(ctx, top)
    ctx.save_for_backward(top, total, *inputs[:4])
    ctx.settings = inputs[4:]


def _backward(
    ctx: Any, grad_loss: Tensor | None, _: None, grad_total: Tensor | None
) -> tuple[Tensor | None, ...]:
    refuse_create_graph()
    if grad_loss is None:
        if grad_total is None:
            return (None,) * len(ctx.needs_input_grad)
        grad_loss = grad_total.new_zeros(())
    needs = ctx.needs_input_grad[:3]
    gradients = _gradients(
        grad_loss, grad_total, *ctx.saved_tensors, *ctx.settings, *needs
    )
    return _as_inputs(gradients, needs, len(ctx.settings))


loss_by_vocabulary.register_autograd(_backward, setup_context=_save)


@custom_op("lowtide::linear_cross_entropy_and_gradients", mutates_args=())
def loss_by_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    compute_dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    token_chunk: int | None,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients of hidden, weight and bias; empty where none is
    asked for."""
    check_targets(targets, len(weight), ignore_index)
    tokens = token_chunk_or_default(
        token_chunk,
        len(targets),
        len(weight),
        compute_dtype,
        WHOLE_VOCABULARY_TILE_BYTES,
    )
    loss, gradients = loss_and_gradients(
        Batch(hidden, targets, bias),
        weight,
        compute_dtype,
        Objective(ignore_index, label_smoothing, z_loss, reduction),
        tokens,
        (for_hidden, for_weight, for_bias),
    )
    return loss, *_or_empty(gradients, hidden)


@loss_by_tokens.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    compute_dtype: torch.dtype,
    *settings: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=accumulate_dtype(compute_dtype))
    return loss, *_empty_gradients(hidden, weight, bias, settings[-3:])


@custom_op("lowtide::scale_gradient_", mutates_args=("gradient",))
def _scale(gradient: Tensor, factor: Tensor) -> None:
    scale_in_place(gradient, factor)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *gradients = output
    _have_no_gradient(ctx, *gradients)
    ctx.save_for_backward(*gradients)
    ctx.num_settings = len(inputs) - 4


def _release(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_create_graph()
    if grad_loss is None:
        return (None,) * len(ctx.needs_input_grad)
    gradients = ctx.saved_tensors
    # In a graph under compilation the saved tensors are outputs of its forward.
    compiling = is_fake(gradients[0])
    if compiling or torch._C._autograd._get_current_graph_task_keep_graph():
        gradients = tuple(gradient.clone() for gradient in gradients)
    for gradient in gradients:
        _scale(gradient, grad_loss)
    return _as_inputs(gradients, ctx.needs_input_grad[:3], ctx.num_settings)


loss_by_tokens.register_autograd(_release, setup_context=_keep)


def _have_no_gradient(ctx: Any, *others: Tensor) -> None:
    ctx.mark_non_differentiable(*others)
    # Else backward begins with zeros for each, one of them as large as the head.
    ctx.set_materialize_grads(False)


def _chunks(
    targets: Tensor,
    weight: Tensor,
    compute_dtype: torch.dtype,
    token_chunk: int | None,
    vocab_chunk: int | None,
) -> tuple[TensorRows, int]:
    vocab_size, features = weight.shape
    width = vocab_chunk_or_default(vocab_chunk, vocab_size, features, compute_dtype)
    tokens = token_chunk_or_default(token_chunk, len(targets), width, compute_dtype)
    return TensorRows(weight, compute_dtype, width), tokens


def _or_empty(
    gradients: tuple[Tensor | None, ...], like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = (like.new_empty(0) if g is None else g for g in gradients)
    return dx, dw, db


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[object, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the shapes and dtypes that :func:`_or_empty` gives."""
    dx, dw, db = (
        owner.new_empty(owner.shape)
        if needed and owner is not None
        else hidden.new_empty(0)
        for owner, needed in zip((hidden, weight, bias), needs, strict=True)
    )
    return dx, dw, db


def _as_inputs(
    gradients: tuple[Tensor, ...], needs: tuple[bool, ...], num_settings: int
) -> tuple[Tensor | None, ...]:
    """One gradient per input: three, the targets' and the settings'."""
    wanted = (g if n else None for g, n in zip(gradients, needs, strict=True))
    return (*wanted, None, *(None,) * num_settings)
