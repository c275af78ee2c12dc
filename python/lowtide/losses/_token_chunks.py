"""The loss with one chunk of tokens against the whole head at a time.

Gradients are computed in forward, while the chunk's logits are there: nothing is
computed twice and the head is read in forward only. The price is a tile as wide as the
vocabulary, a gradient of the head that lives from forward to backward, and one rounding
of it to its dtype per chunk.
"""

import torch
from torch import Tensor

from lowtide._base.rows import RowChunk
from lowtide.losses._objective import Objective, Statistics
from lowtide.losses._rows import accumulate_dtype
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
    shares = objective.shares(batch.targets, wide)
    shares.mul_(objective.scale(batch.targets, wide))
    seen = Statistics(
        top=torch.empty_like(shares),
        total=torch.empty_like(shares),
        target_logit=torch.empty_like(shares),
        logit_sum=torch.empty_like(shares) if objective.label_smoothing else None,
    )
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
    db = shares.new_zeros(vocab_size) if for_bias else None
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
        row, _ = RowChunk(0, vocab_size).place(batch.targets[tokens])
        part = seen.of(tokens)
        part.target_logit.copy_(tile.gather(1, row[:, None])[:, 0])
        share = shares[tokens] if any(needs) else None
        _statistics_and_gradient(tiles, tile, part, share, row, objective, db)
        if dx is not None:
            tiles.multiply(tile, rows, dx[tokens], add=False)
        if dw is not None:
            tiles.multiply(tile.t(), hidden, dw, add=tokens.start > 0)
    return Gradients(
        dx, dw, None if db is None or batch.bias is None else db.to(batch.bias.dtype)
    )


def _statistics_and_gradient(
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
        subtract_max_(z, out=part.top).exp_()
        torch.sum(z, 1, out=part.total)
        if shares is not None:
            terms = objective.terms(part.top, part.total, shares[tokens], z.shape[1])
            finish_gradient_(z, terms, row[tokens], bias_gradient)
            tiles.store(tile, tokens, z)
