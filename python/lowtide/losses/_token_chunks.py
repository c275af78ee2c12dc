"""The loss with one chunk of tokens against the whole head at a time.

Gradients are computed in forward, while the chunk's logits are there: nothing is
computed twice and the head is read in forward only. The price is a tile as wide as the
vocabulary, a gradient of the head that lives from forward to backward, and one rounding
of it to its dtype per chunk.
"""

import torch
from torch import Tensor

from lowtide.losses._objective import Objective, Statistics
from lowtide.losses._rows import RowChunk, accumulate_dtype
from lowtide.losses._tiles import Tiles, finish_gradient_, subtract_max_, token_chunks
from lowtide.losses._vocabulary_chunks import Batch, Gradients


def loss_and_gradients(
    batch: Batch,
    weight: Tensor,
    compute_dtype: torch.dtype,
    objective: Objective,
    token_chunk: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Gradients]:
    """The loss, 0-dim in the accumulate dtype, and its gradients.

    ``weight``: [vocab_size, features]; ``needs``: of hidden, weight and bias.
    """
    wide = accumulate_dtype(compute_dtype)
    zeros = batch.hidden.new_zeros(batch.targets.shape, dtype=wide)
    logit_sum = torch.zeros_like(zeros) if objective.label_smoothing else None
    seen = Statistics(torch.empty_like(zeros), zeros, logit_sum)
    shares = objective.shares(batch.targets, wide)
    shares.mul_(objective.scale(batch.targets, wide))
    # The buffers of the pass end with it.
    gradients = _pass(
        seen, shares, batch, weight, compute_dtype, objective, token_chunk, needs
    )
    return objective.loss(seen, batch.targets, len(weight)), gradients


def _pass(
    seen: Statistics,
    shares: Tensor,
    batch: Batch,
    weight: Tensor,
    compute_dtype: torch.dtype,
    objective: Objective,
    token_chunk: int,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """Fills ``seen``. ``shares``: [tokens], a token's weight in the loss."""
    num_tokens, vocab_size = len(batch.targets), len(weight)
    for_hidden, for_weight, for_bias = needs
    dx = batch.hidden.new_empty(batch.hidden.shape) if for_hidden else None
    dw = weight.new_empty(weight.shape) if for_weight else None
    if dw is not None and not num_tokens:
        dw.zero_()
    db = seen.lse.new_zeros(vocab_size) if for_bias else None
    rows = weight.to(compute_dtype)
    bias = None if batch.bias is None else batch.bias.to(compute_dtype)
    tiles = Tiles(
        min(token_chunk, max(num_tokens, 1)),
        vocab_size,
        weight.shape[1],
        compute_dtype,
        weight.device,
    )
    for tokens in token_chunks(num_tokens, token_chunk):
        hidden = tiles.narrow(batch.hidden[tokens])
        tile = tiles.logits(hidden, rows, bias)
        row, inside = RowChunk(0, vocab_size).place(batch.targets[tokens])
        picked = tile.gather(1, row[:, None])[:, 0]
        seen.target_logit[tokens] = picked.masked_fill_(~inside, 0)
        _fold(
            tiles,
            tile,
            seen.of(tokens),
            shares[tokens] if any(needs) else None,
            row,
            objective,
            db,
        )
        if dx is not None:
            tiles.multiply(tile, rows, dx[tokens], add=False)
        if dw is not None:
            tiles.multiply(tile.t(), hidden, dw, add=tokens.start > 0)
    return Gradients(
        dx, dw, None if db is None or batch.bias is None else db.to(batch.bias.dtype)
    )


def _fold(
    tiles: Tiles,
    tile: Tensor,
    seen: Statistics,
    shares: Tensor | None,
    row: Tensor,
    objective: Objective,
    bias_gradient: Tensor | None,
) -> None:
    """Fills ``seen``; replaces logits by the gradient if there are ``shares``."""
    for tokens, z in tiles.blocks(tile):
        part = seen.of(tokens)
        if part.logit_sum is not None:
            torch.sum(z, 1, out=part.logit_sum)
        subtract_max_(z, out=part.lse).exp_()
        total = z.sum(1)
        part.lse.add_(total.log())
        if shares is None:
            continue
        share = shares[tokens]
        factor = objective.factor(part.lse)
        per_token = share if factor is None else share * factor
        z.mul_((per_token / total)[:, None])
        even = objective.even(share, z.shape[1])
        finish_gradient_(z, even, row[tokens], objective.hit(share), bias_gradient)
        tiles.store(tile, tokens, z)
