"""The loss in autograd for rows of the head that somebody else holds."""

from typing import Any

import torch
from torch import Tensor

from lowtide.losses._checks import check_targets
from lowtide.losses._objective import Objective
from lowtide.losses._rows import VocabularyRows
from lowtide.losses._sizes import token_chunk_or_default
from lowtide.losses._vocabulary_chunks import (
    Batch,
    Saved,
    gradients_by_rows,
    loss_by_rows,
)


@torch.compiler.disable  # rows come and go by calls that a graph cannot hold
def loss_of_rows(
    hidden: Tensor,
    parameter: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: VocabularyRows,
    objective: Objective,
    token_chunk: int | None = None,
) -> tuple[Tensor, Saved]:
    """The loss, 0-dim or [tokens] in the accumulate dtype, and what its backward needs.

    hidden: [tokens, features]; targets: int64 [tokens]; bias: [vocab_size].
    parameter: stands for the weight in autograd and gets ``rows.take_gradient()``; its
    values are not read. token_chunk: tokens in a tile, None for the default. ``rows``
    is kept for backward.
    """
    loss, *saved = _RowsLoss.apply(
        hidden, parameter, bias, targets, rows, objective, token_chunk
    )
    return loss, Saved(*saved)


class _RowsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        parameter: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: VocabularyRows,
        objective: Objective,
        token_chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_targets(targets, rows.vocab_size, objective.ignore_index)
        tokens = token_chunk_or_default(
            token_chunk,
            len(targets),
            max(chunk.num_rows for chunk in rows.chunks),
            rows.compute_dtype,
        )
        batch = Batch(hidden, targets, bias)
        loss, saved = loss_by_rows(batch, rows, objective, tokens)
        ctx.save_for_backward(*saved, *batch)
        ctx.mark_non_differentiable(saved.top)
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.objective, ctx.token_chunk = rows, objective, tokens
        return loss, *saved

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, _: None, grad_total: Tensor | None
    ) -> tuple[Any, ...]:
        refuse_create_graph()
        top, total, *batch = ctx.saved_tensors
        if grad_loss is None:
            grad_loss = top.new_zeros(())
        gradients = gradients_by_rows(
            grad_loss,
            Saved(top, total),
            Batch(*batch),
            ctx.rows,
            ctx.objective,
            ctx.token_chunk,
            ctx.needs_input_grad[:3],
            grad_total,
        )
        return (*gradients, None, None, None, None)


def refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "lowtide: linear_cross_entropy: expected a backward without create_graph, "
            "got create_graph=True. Use torch.nn.functional.cross_entropy on the "
            "logits where second derivatives are needed."
        )
