"""Small cases of a head and its loss, and other ways to compute it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide._base.rows import RowChunk, strided_chunks
from lowtide.losses._objective import Objective
from lowtide.losses._rows import accumulate_dtype


@dataclass(frozen=True)
class Case:
    """Inputs of the loss, made from the seed; every fifth token is ignored."""

    tokens: int = 23
    features: int = 12
    vocab_size: int = 37
    dtype: torch.dtype = torch.float32
    bias: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    ignore_index: int = -100
    seed: int = 0

    def __str__(self) -> str:
        extras = [name for name in ("bias", "label_smoothing", "z_loss") if self[name]]
        return "-".join([self.reduction, *extras])

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def settings(self) -> dict[str, Any]:
        names = ("ignore_index", "label_smoothing", "z_loss", "reduction")
        return {name: self[name] for name in names}

    @property
    def objective(self) -> Objective:
        return Objective(
            self.ignore_index, self.label_smoothing, self.z_loss, self.reduction
        )

    def tensors(self) -> tuple[dict[str, Tensor], Tensor]:
        """(hidden, weight and, if asked for, bias: leaves; targets)."""
        g = torch.Generator().manual_seed(self.seed)
        shapes: dict[str, tuple[int, ...]] = {
            "hidden": (self.tokens, self.features),
            "weight": (self.vocab_size, self.features),
        }
        if self.bias:
            shapes["bias"] = (self.vocab_size,)
        leaves = {
            name: torch.randn(shape, generator=g, dtype=torch.float64)
            .to(self.dtype)
            .requires_grad_()
            for name, shape in shapes.items()
        }
        targets = torch.randint(self.vocab_size, (self.tokens,), generator=g)
        targets[::5] = self.ignore_index
        return leaves, targets


# Each setting alone and all together, in both reductions.
CASES = [
    replace(case, reduction=reduction)
    for reduction in ("mean", "sum")
    for case in (
        Case(),
        Case(bias=True),
        Case(label_smoothing=0.1),
        Case(z_loss=1e-2),
        Case(bias=True, label_smoothing=0.3, z_loss=1e-3),
    )
]


def plain_loss(leaves: dict[str, Tensor], targets: Tensor, case: Case) -> Tensor:
    """torch's own: all logits at once, upcast as usual."""
    logits = F.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    logits = logits.to(accumulate_dtype(logits.dtype))
    loss = F.cross_entropy(
        logits,
        targets,
        ignore_index=case.ignore_index,
        label_smoothing=case.label_smoothing,
        reduction=case.reduction,
    )
    if case.z_loss:
        counted = targets != case.ignore_index
        if case.reduction == "none":
            return loss + case.z_loss * logits.logsumexp(1).square() * counted
        squares = case.z_loss * logits.logsumexp(1)[counted].square()
        loss = loss + (squares.mean() if case.reduction == "mean" else squares.sum())
    return loss


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a third of the loss: a factor that bf16 does not hold."""
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    values = torch.autograd.grad(loss / 3, [leaves[name] for name in names])
    return dict(zip(names, values, strict=True))


def same_order(
    leaves: dict[str, Tensor],
    targets: Tensor,
    case: Case,
    token_chunk: int,
    chunks: Sequence[Tensor],
    wide_product: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients written down straight, in the product's order of sums.

    ``chunks``: vocabulary rows of each chunk; ``wide_product``: whether bf16 products
    have fp32 results.
    """
    hidden, weight = leaves["hidden"].detach(), leaves["weight"].detach()
    bias = leaves["bias"].detach() if case.bias else None
    vocab_size, wide = case.vocab_size, accumulate_dtype(case.dtype)
    parts = [slice(s, s + token_chunk) for s in range(0, len(targets), token_chunk)]
    counted = targets != case.ignore_index

    def logits(part: slice, rows: Tensor) -> Tensor:
        x, w = hidden[part], weight[rows]
        z = x @ w.t() if bias is None else torch.addmm(bias[rows], x, w.t())
        return z.to(wide)

    def product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        if case.dtype != wide and not wide_product:
            rounded = (a @ b).to(wide)
            return rounded if total is None else total + rounded
        a, b = a.to(wide), b.to(wide)
        return a @ b if total is None else torch.addmm(total, a, b)

    top = torch.full((len(targets),), torch.finfo(wide).min, dtype=wide)
    total, target_logit, logit_sum = (torch.zeros_like(top) for _ in range(3))
    for rows in chunks:
        for part in parts:
            z = logits(part, rows)
            hit = targets[part, None] == rows
            target_logit[part] += torch.where(hit, z, 0.0).sum(1)
            logit_sum[part] += z.sum(1)
            of_chunk = z.amax(1)
            sums = (z - of_chunk[:, None]).exp().sum(1)
            highest = torch.maximum(top[part], of_chunk)
            total[part] *= (top[part] - highest).exp()
            total[part] = total[part].addcmul(sums, (of_chunk - highest).exp())
            top[part] = highest
    lse = total.log() + top
    loss = total.log().sub(target_logit - top, alpha=1 - case.label_smoothing)
    loss = loss.sub(logit_sum / vocab_size - top, alpha=case.label_smoothing)
    loss = loss.addcmul(lse, lse, value=case.z_loss)
    loss = torch.where(counted, loss, 0.0).sum()

    third = torch.tensor(1 / 3, dtype=wide)
    scale = third / 1
    if case.reduction == "mean":
        loss, scale = loss / counted.sum(), 1 / counted.sum().to(wide) * third
    factor = counted / total * (2 * case.z_loss * lse + 1)
    dx: list[Tensor | None] = [None] * len(parts)
    dw, db = torch.zeros_like(weight, dtype=wide), torch.zeros(vocab_size, dtype=wide)
    for rows in chunks:
        of_rows: Tensor | None = None
        bias_sum = torch.zeros(len(rows), dtype=wide)
        for number, part in enumerate(parts):
            g = (logits(part, rows) - top[part, None]).exp() * factor[part, None]
            share = counted[part, None].to(wide)
            g = g - share * (case.label_smoothing / vocab_size)
            hit = targets[part, None] == rows
            g = torch.where(hit, g - share * (1 - case.label_smoothing), g)
            bias_sum += g.sum(0)
            g = g.to(case.dtype)
            dx[number] = product(dx[number], g, weight[rows])
            of_rows = product(of_rows, g.t(), hidden[part])
        assert of_rows is not None
        dw[rows], db[rows] = of_rows * scale, bias_sum * scale
    whole_dx = torch.cat([part for part in dx if part is not None])
    found = {"hidden": whole_dx * scale, "weight": dw}
    if case.bias:
        found["bias"] = db
    return loss, {name: value.to(case.dtype) for name, value in found.items()}


class StridedRows:
    """Shards of N ranks in one process; buffers go bad as soon as they may.

    Padding is nan, a chunk's rows turn nan when the next chunk is asked for, and a
    gradient buffer turns nan when it is put back. ``log`` lists the calls.
    """

    def __init__(self, weight: Tensor, world_size: int, rows_per_rank: int) -> None:
        self.vocab_size, self.features = weight.shape
        self.compute_dtype = weight.dtype
        self.chunks = strided_chunks(self.vocab_size, world_size, rows_per_rank)
        self.log: list[str] = []
        self._shard = -(-self.vocab_size // world_size)
        padded = weight.new_full((self._shard * world_size, self.features), torch.nan)
        padded[: self.vocab_size] = weight.detach()
        self._shards = padded.view(world_size, self._shard, self.features)
        self._gradients = torch.full_like(
            self._shards, torch.nan, dtype=accumulate_dtype(weight.dtype)
        )
        size = max(chunk.num_rows for chunk in self.chunks)
        self._rows = weight.new_empty(size, self.features)
        self._buffer = self._gradients.new_empty(size, self.features)

    def read(self, *, backward: bool) -> Generator[Tensor, None, None]:
        self.log.append("backward" if backward else "forward")
        try:
            for chunk in self.chunks:
                self.log.append(f"rows {chunk.start}")
                rows = self._rows[: chunk.num_rows]
                torch.cat(list(self._shards[:, self._span(chunk)]), out=rows)
                yield rows
                self._rows.fill_(torch.nan)
        finally:
            self.log.append("end")

    def gradient_buffer(self, chunk: RowChunk) -> Tensor:
        self.log.append(f"buffer {chunk.start}")
        return self._buffer[: chunk.num_rows].fill_(torch.nan)

    def put_gradient(self, chunk: RowChunk, gradient: Tensor) -> None:
        self.log.append(f"put {chunk.start}")
        assert gradient.data_ptr() == self._buffer.data_ptr()
        blocks = gradient.view(chunk.blocks, chunk.width, self.features)
        self._gradients[:, self._span(chunk)] = blocks
        self._buffer.fill_(torch.nan)

    def take_gradient(self) -> Tensor:
        self.log.append("take")
        rows = self._gradients.view(-1, self.features)
        assert rows[self.vocab_size :].eq(0).all(), "gradient of padding"
        return rows[: self.vocab_size].to(self.compute_dtype)

    def _span(self, chunk: RowChunk) -> slice:
        return slice(chunk.start, chunk.start + chunk.width)
