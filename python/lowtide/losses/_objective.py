"""The loss of a token as a function of a few sums over its logits, and its gradient.

For logits z of V classes, target y, lse = log sum exp z:

    loss = (1 - label_smoothing) (lse - z[y]) + label_smoothing (lse - mean z)
           + z_loss lse^2
    d loss / d z = exp(z - lse) (1 + 2 z_loss lse) - label_smoothing / V
           - (1 - label_smoothing) [at y]
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """What a pass over all logits of the tokens leaves: [tokens] each, wide."""

    lse: Tensor
    target_logit: Tensor
    logit_sum: Tensor | None  # only with label smoothing

    def of(self, tokens: slice) -> "Statistics":
        logit_sum = None if self.logit_sum is None else self.logit_sum[tokens]
        return Statistics(self.lse[tokens], self.target_logit[tokens], logit_sum)


class GradientTerms(NamedTuple):
    """The gradient with respect to a token's logits: ``exp(z - shift) * factor - even``
    and ``- hit`` at the target. [tokens] each, wide; an ignored token's are such that
    its gradient is zero."""

    shift: Tensor
    factor: Tensor | None
    even: Tensor | None
    hit: Tensor

    def of(self, tokens: slice) -> "GradientTerms":
        parts = (None if term is None else term[tokens] for term in self)
        return GradientTerms(*parts)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Objective:
    ignore_index: int
    label_smoothing: float
    z_loss: float
    mean: bool

    def loss(self, seen: Statistics, targets: Tensor, vocab_size: int) -> Tensor:
        """0-dim. The mean over no token is nan, as torch's is."""
        loss = seen.lse.sub(seen.target_logit, alpha=1 - self.label_smoothing)
        if seen.logit_sum is not None:
            loss.sub_(seen.logit_sum, alpha=self.label_smoothing / vocab_size)
        if self.z_loss:
            loss.addcmul_(seen.lse, seen.lse, value=self.z_loss)
        counted = targets != self.ignore_index
        total = loss.masked_fill_(~counted, 0).sum()
        return total / counted.sum() if self.mean else total

    def scale(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """0-dim: d loss / d (a token's loss). Zero where there is no token to count,
        so that gradients are then zero, as torch's are."""
        if not self.mean:
            return torch.ones((), dtype=dtype, device=targets.device)
        count = targets.ne(self.ignore_index).sum().to(dtype)
        return count.reciprocal().masked_fill_(count == 0, 0)

    def shares(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens]: one, or zero for an ignored token."""
        return targets.ne(self.ignore_index).to(dtype)

    def factor(self, lse: Tensor) -> Tensor | None:
        """What the softmax in the gradient is multiplied by."""
        return lse.mul(2 * self.z_loss).add_(1) if self.z_loss else None

    def even(self, shares: Tensor, vocab_size: int) -> Tensor | None:
        """What every class's gradient is less by."""
        if not self.label_smoothing:
            return None
        return shares * (self.label_smoothing / vocab_size)

    def hit(self, shares: Tensor) -> Tensor:
        """What the target's gradient is less by."""
        return shares * (1 - self.label_smoothing)

    def terms(self, lse: Tensor, targets: Tensor, vocab_size: int) -> GradientTerms:
        shares = self.shares(targets, lse.dtype)
        return GradientTerms(
            shift=lse.masked_fill(shares == 0, torch.inf),
            factor=self.factor(lse),
            even=self.even(shares, vocab_size),
            hit=self.hit(shares),
        )
