"""The loss with one chunk of the head's rows at a time.

Forward folds the log-sum-exp over chunks; backward computes each tile of logits again.
A chunk's gradient rows are complete once all tokens have met the chunk. Neither the
logits nor a wide copy of the head or its gradient ever exist.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide._base.rows import RowChunk
from lowtide.losses._objective import GradientTerms, Objective, Statistics
from lowtide.losses._rows import VocabularyRows, accumulate_dtype
from lowtide.losses._tiles import Tiles, fold, tile_gradient, token_chunks


class Gradients(NamedTuple):
    """In the dtypes of their owners; None where none was asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Batch(NamedTuple):
    """hidden: [tokens, features]; targets: int64 [tokens]; bias: [vocab_size]."""

    hidden: Tensor
    targets: Tensor
    bias: Tensor | None


class Saved(NamedTuple):
    """For backward: see `Statistics`. A gradient with respect to ``total`` is that at
    a fixed ``top``, whose choice changes no log-sum-exp."""

    top: Tensor
    total: Tensor

    def logsumexp(self) -> Tensor:
        """[tokens]"""
        return self.total.log() + self.top


def loss_by_rows(
    batch: Batch, rows: VocabularyRows, objective: Objective, token_chunk: int
) -> tuple[Tensor, Saved]:
    """The loss, 0-dim or [tokens], in the accumulate dtype."""
    seen = _statistics(batch, rows, objective, token_chunk)
    loss = objective.loss(seen, batch.targets, rows.vocab_size)
    return loss, Saved(seen.top, seen.total)


def gradients_by_rows(
    grad_loss: Tensor,
    saved: Saved,
    batch: Batch,
    rows: VocabularyRows,
    objective: Objective,
    token_chunk: int,
    needs: tuple[bool, bool, bool],
    grad_total: Tensor | None = None,
) -> Gradients:
    """``needs``: of hidden, weight and bias; ``grad_loss``: as the loss;
    ``grad_total``: [tokens], with respect to ``saved.total``."""
    scale = objective.scale(batch.targets, saved.top.dtype) * grad_loss
    shares = objective.shares(batch.targets, saved.top.dtype)
    if not len(shares):  # of which nothing is the largest
        scale, grad_total = scale.sum(), None
    if scale.dim() == 0 and grad_total is None:
        terms = objective.terms(*saved, shares, rows.vocab_size)
    else:
        # Tiles in 16 bits hold gradients in units of the largest.
        scale = scale.expand_as(shares).masked_fill(shares == 0, 0)
        largest = scale.abs().amax()
        if grad_total is not None:
            of_totals = (grad_total * saved.total).abs().amax()
            largest = torch.maximum(of_totals, largest)
        largest.masked_fill_(largest == 0, 1)
        terms = objective.terms(*saved, scale / largest, rows.vocab_size)
        if grad_total is not None:
            terms.factor.add_(grad_total / largest)
        scale = largest
    # The buffers of the pass and of the rows end ahead of the casts.
    dx, db = _backward_pass(scale, terms, batch, rows, token_chunk, needs)
    dw = rows.take_gradient() if needs[1] else None
    return Gradients(
        hidden=None if dx is None else dx.mul_(scale).to(batch.hidden.dtype),
        weight=dw,
        bias=None if db is None or batch.bias is None else db.to(batch.bias.dtype),
    )


def _statistics(
    batch: Batch, rows: VocabularyRows, objective: Objective, token_chunk: int
) -> Statistics:
    wide = accumulate_dtype(rows.compute_dtype)
    zeros = batch.hidden.new_zeros(batch.targets.shape, dtype=wide)
    seen = Statistics(
        top=torch.full_like(zeros, torch.finfo(wide).min),
        total=torch.zeros_like(zeros),
        target_logit=zeros,
        logit_sum=torch.zeros_like(zeros) if objective.label_smoothing else None,
    )
    tiles = _tiles(batch, rows, token_chunk)
    with _one_pass(rows, batch.bias, backward=False) as chunks:
        for chunk, weight, bias in chunks:
            for tokens in token_chunks(len(batch.targets), token_chunk):
                hidden = tiles.narrow(batch.hidden[tokens])
                tile = tiles.logits(hidden, weight, bias)
                row, inside = chunk.place(batch.targets[tokens])
                part = seen.of(tokens)
                picked = tile.gather(1, row[:, None])[:, 0].masked_fill_(~inside, 0)
                part.target_logit.add_(picked)
                fold(tiles, tile, part)
    return seen


def _backward_pass(
    scale: Tensor,
    terms: GradientTerms,
    batch: Batch,
    rows: VocabularyRows,
    token_chunk: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden (not scaled yet) and bias; the weight's go to ``rows``."""
    for_hidden, for_weight, for_bias = needs
    wide = terms.top
    dx = wide.new_empty(batch.hidden.shape) if for_hidden else None
    db = wide.new_empty(rows.vocab_size) if for_bias else None
    tiles = _tiles(batch, rows, token_chunk)
    with _one_pass(rows, batch.bias, backward=True) as chunks:
        for number, (chunk, weight, bias) in enumerate(chunks):
            dw = rows.gradient_buffer(chunk) if for_weight else None
            chunk_db = wide.new_zeros(len(weight)) if for_bias else None
            for tokens in token_chunks(len(batch.targets), token_chunk):
                hidden = tiles.narrow(batch.hidden[tokens])
                tile = tiles.logits(hidden, weight, bias)
                row, inside = chunk.place(batch.targets[tokens])
                tile_gradient(tiles, tile, terms.of(tokens), row, inside, chunk_db)
                if dx is not None:
                    tiles.multiply(tile, weight, dx[tokens], add=number > 0)
                if dw is not None:
                    add = tokens.start > 0
                    tiles.multiply(tile.t(), hidden, dw[: len(weight)], add=add)
            if dw is not None:
                _finish(dw, len(weight), scale, batch)
                rows.put_gradient(chunk, dw)
            if db is not None and chunk_db is not None:
                _put(db, chunk_db.mul_(scale), chunk)
    return dx, db


@contextmanager
def _one_pass(
    rows: VocabularyRows, bias: Tensor | None, *, backward: bool
) -> Iterator[Iterator[tuple[RowChunk, Tensor, Tensor | None]]]:
    """Chunks with their weight and bias ahead of the padding."""
    with closing(rows.read(backward=backward)) as weights:
        yield (
            (
                chunk,
                weight[: chunk.num_valid(rows.vocab_size)],
                None if bias is None else _of(bias, chunk).to(rows.compute_dtype),
            )
            for chunk, weight in zip(rows.chunks, weights, strict=True)
        )


def _of(bias: Tensor, chunk: RowChunk) -> Tensor:
    if chunk.blocks == 1:
        return bias[chunk.start : chunk.start + chunk.num_rows]
    return bias[chunk.vocabulary_rows(len(bias), bias.device)]


def _put(bias_gradient: Tensor, chunk_gradient: Tensor, chunk: RowChunk) -> None:
    if chunk.blocks == 1:
        _of(bias_gradient, chunk).copy_(chunk_gradient)
    else:
        at = chunk.vocabulary_rows(len(bias_gradient), bias_gradient.device)
        bias_gradient.index_copy_(0, at, chunk_gradient)


def _finish(dw: Tensor, num_valid: int, scale: Tensor, batch: Batch) -> None:
    filled = num_valid if len(batch.targets) else 0
    dw[:filled].mul_(scale)
    dw[filled:].zero_()


def _tiles(batch: Batch, rows: VocabularyRows, token_chunk: int) -> Tiles:
    return Tiles(
        min(token_chunk, max(len(batch.targets), 1)),
        max(chunk.num_valid(rows.vocab_size) for chunk in rows.chunks),
        rows.features,
        rows.compute_dtype,
        batch.hidden.device,
    )
