"""One tile of logits, [tokens, vocabulary rows], and the buffers all tiles share."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.losses._objective import GradientTerms, Statistics
from lowtide.losses._rows import accumulate_dtype

# Pointwise work on a tile goes by blocks of tokens, in a scratch of this size. It
# holds them in fp32 and fits in the last-level cache of current accelerators.
SCRATCH_BYTES = 16 << 20


def token_chunks(num_tokens: int, token_chunk: int) -> Iterator[slice]:
    for start in range(0, num_tokens, token_chunk):
        yield slice(start, min(start + token_chunk, num_tokens))


class Tiles:
    """A tile buffer in the compute dtype and, unless that is the accumulate dtype
    already, a scratch in which ``block_tokens`` tokens of a tile are fp32."""

    def __init__(
        self,
        tokens: int,
        rows: int,
        features: int,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        wide = accumulate_dtype(compute_dtype)
        fitting = SCRATCH_BYTES // (wide.itemsize * rows)
        self.block_tokens = max(1, min(tokens, fitting))
        self._tile = torch.empty(tokens * rows, dtype=compute_dtype, device=device)
        self._hidden: Tensor | None = None
        self._scratch: Tensor | None = None
        if wide != compute_dtype:
            # `multiply` needs at least a row in both dtypes.
            size = max(self.block_tokens * rows, 2 * features)
            self._scratch = torch.empty(size, dtype=wide, device=device)

    def narrow(self, hidden: Tensor) -> Tensor:
        """Hidden states of a tile in the compute dtype; a copy lives until the next
        call."""
        if hidden.dtype == self._tile.dtype:
            return hidden
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden, dtype=self._tile.dtype)
        return self._hidden[: hidden.shape[0]].copy_(hidden)

    def logits(self, hidden: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """[tokens, rows] in the tile buffer, valid until the next call."""
        tile = self._tile[: hidden.shape[0] * rows.shape[0]].view(
            hidden.shape[0], rows.shape[0]
        )
        if bias is None:
            return torch.mm(hidden, rows.t(), out=tile)
        return torch.addmm(bias, hidden, rows.t(), out=tile)

    def blocks(self, tile: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(tokens, their logits in the accumulate dtype): the tile itself or a copy.

        What the caller leaves in a copy is lost unless it is stored with `store`.
        """
        for tokens in token_chunks(tile.shape[0], self.block_tokens):
            part = tile[tokens]
            if self._scratch is not None:
                part = self._scratch[: part.numel()].view_as(part).copy_(part)
            yield tokens, part

    def store(self, tile: Tensor, tokens: slice, block: Tensor) -> None:
        if self._scratch is not None:
            tile[tokens].copy_(block)

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
        """out = a @ b, or out += a @ b.

        ``a`` and ``b`` are in the compute dtype, ``out`` in it or in the accumulate
        dtype. Where a device has no product with a wider result, the product is
        rounded to the compute dtype before it is added.
        """
        if out.dtype == a.dtype:
            out.addmm_(a, b) if add else torch.mm(a, b, out=out)
        elif has_wide_product(a.dtype, out.dtype, a.device):
            if add:
                torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
            else:
                torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:
            self._multiply_by_rows(a, b, out, add=add)

    def _multiply_by_rows(self, a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
        assert self._scratch is not None
        width = b.shape[1]
        row_bytes = width * (a.element_size() + self._scratch.element_size())
        fitting = self._scratch.nbytes // row_bytes
        for rows in token_chunks(a.shape[0], fitting):
            size = (rows.stop - rows.start) * width
            wide = self._scratch[:size].view(-1, width)
            narrow = self._scratch[size:].view(a.dtype)[:size].view(-1, width)
            torch.mm(a[rows], b, out=narrow)
            wide.copy_(narrow)
            out[rows].add_(wide) if add else out[rows].copy_(wide)


@functools.cache
def has_wide_product(
    dtype: torch.dtype, wide: torch.dtype, device: torch.device
) -> bool:
    """Whether the device multiplies ``dtype`` into a ``wide`` result."""
    a = torch.zeros(16, 16, dtype=dtype, device=device)
    out = torch.zeros(16, 16, dtype=wide, device=device)
    try:
        torch.mm(a, a, out_dtype=wide, out=out)
        torch.addmm(out, a, a, out_dtype=wide, out=out)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def fold(tiles: Tiles, tile: Tensor, seen: Statistics) -> None:
    """Adds the tile's logits to ``seen`` (but for the target's), in place.

    The tile's contents are lost.
    """
    top, total = torch.empty_like(seen.top), torch.empty_like(seen.total)
    for tokens, z in tiles.blocks(tile):
        if seen.logit_sum is not None:
            seen.logit_sum[tokens] += z.sum(1)
        subtract_max_(z, out=top[tokens]).exp_()
        torch.sum(z, 1, out=total[tokens])
    highest = torch.maximum(seen.top, top)
    seen.total.mul_(seen.top.sub_(highest).exp_())
    seen.total.addcmul_(total, top.sub_(highest).exp_())
    seen.top.copy_(highest)


def subtract_max_(z: Tensor, out: Tensor) -> Tensor:
    """Subtracts each token's largest logit and leaves it in ``out``."""
    torch.amax(z, 1, out=out)
    # Where all are -inf, -inf - -inf would be nan.
    out.clamp_(min=torch.finfo(out.dtype).min)
    return z.sub_(out[:, None])


def tile_gradient(
    tiles: Tiles,
    tile: Tensor,
    terms: GradientTerms,
    row: Tensor,
    inside: Tensor,
    bias_gradient: Tensor | None,
) -> None:
    """Replaces logits by the gradient with respect to them; adds its sum over tokens
    to ``bias_gradient``. ``row``, ``inside``: where each token's target is."""
    terms = terms._replace(hit=terms.hit * inside)
    for tokens, z in tiles.blocks(tile):
        part = terms.of(tokens)
        z.sub_(part.top[:, None]).exp_()
        finish_gradient_(z, part, row[tokens], bias_gradient)
        tiles.store(tile, tokens, z)


def finish_gradient_(
    z: Tensor, terms: GradientTerms, row: Tensor, bias_gradient: Tensor | None
) -> None:
    """From ``exp(logits - top)`` to the gradient."""
    z.mul_(terms.factor[:, None])
    if terms.even is not None:
        z.sub_(terms.even[:, None])
    # One entry a token, so scatter_ is deterministic where scatter_add_ need not be.
    at_row = row[:, None]
    z.scatter_(1, at_row, z.gather(1, at_row).sub_(terms.hit[:, None]))
    if bias_gradient is not None:
        bias_gradient += z.sum(0)


def scale_in_place(tensor: Tensor, factor: Tensor) -> None:
    """``tensor *= factor`` (0-dim), computed in the accumulate dtype: a factor such as
    1/3 is not rounded to bf16 first."""
    wide = accumulate_dtype(tensor.dtype)
    if tensor.dtype == wide or not tensor.numel():
        tensor.mul_(factor)
        return
    flat = tensor.view(-1)
    scratch = torch.empty(
        min(flat.numel(), SCRATCH_BYTES // wide.itemsize),
        dtype=wide,
        device=tensor.device,
    )
    for part in token_chunks(flat.numel(), scratch.numel()):
        block = scratch[: part.stop - part.start].copy_(flat[part])
        flat[part].copy_(block.mul_(factor))
