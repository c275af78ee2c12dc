"""The loss of a token as a function of a few sums over its logits, and its gradient.

For logits z of V classes, target y, lse = log sum exp z:

    loss = (1 - label_smoothing) (lse - z[y]) + label_smoothing (lse - mean z)
           + z_loss lse^2
    d loss / d z = exp(z - lse) (1 + 2 z_loss lse) - label_smoothing / V
           - (1 - label_smoothing) [at y]

lse is kept as the largest logit and the sum of exponentials below it: one fp32 number
would round away what large logits differ by.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """What a pass over all logits of the tokens leaves: [tokens] each, in the
    accumulate dtype."""

    top: Tensor  # the largest logit
    total: Tensor  # sum of exp(logit - top)
    target_logit: Tensor
    logit_sum: Tensor | None  # only with label smoothing

    def of(self, tokens: slice) -> "Statistics":
        return Statistics(
            self.top[tokens],
            self.total[tokens],
            self.target_logit[tokens],
            None if self.logit_sum is None else self.logit_sum[tokens],
        )


class GradientTerms(NamedTuple):
    """The gradient with respect to a token's logits: ``exp(z - top) * factor - even``
    and ``- hit`` at the target. [tokens] each; zero but for ``top`` if ignored."""

    top: Tensor
    factor: Tensor
    even: Tensor | None
    hit: Tensor

    def of(self, tokens: slice) -> "GradientTerms":
        return GradientTerms(
            self.top[tokens],
            self.factor[tokens],
            None if self.even is None else self.even[tokens],
            self.hit[tokens],
        )


@dataclasses.dataclass(frozen=True)
class Objective:
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str  # "mean", "sum" or "none"

    def loss(self, seen: Statistics, targets: Tensor, vocab_size: int) -> Tensor:
        """0-dim, or [tokens] without a reduction. The mean over no token is nan, as
        torch's is."""
        loss = seen.total.log()
        lse = seen.top + loss if self.z_loss else None
        loss.sub_(seen.target_logit - seen.top, alpha=1 - self.label_smoothing)
        if seen.logit_sum is not None:
            below = seen.logit_sum.div(vocab_size).sub_(seen.top)
            loss.sub_(below, alpha=self.label_smoothing)
        if lse is not None:
            loss.addcmul_(lse, lse, value=self.z_loss)
        counted = targets != self.ignore_index
        loss.masked_fill_(~counted, 0)
        if self.reduction == "none":
            return loss
        total = loss.sum()
        return total / counted.sum() if self.reduction == "mean" else total

    def scale(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """0-dim: d loss / d (a token's loss). Zero where there is no token to count,
        so that gradients are then zero, as torch's are."""
        if self.reduction != "mean":
            return torch.ones((), dtype=dtype, device=targets.device)
        count = targets.ne(self.ignore_index).sum().to(dtype)
        return count.reciprocal().masked_fill_(count == 0, 0)

    def shares(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens]: one, or zero for an ignored token."""
        return targets.ne(self.ignore_index).to(dtype)

    def terms(
        self, top: Tensor, total: Tensor, shares: Tensor, vocab_size: int
    ) -> GradientTerms:
        """``shares``: [tokens], what each token's gradient is multiplied by."""
        factor = shares / total
        if self.z_loss:
            lse = total.log().add_(top)
            factor.mul_(lse.mul_(2 * self.z_loss).add_(1))
        smoothing = self.label_smoothing
        return GradientTerms(
            top,
            factor,
            even=shares * (smoothing / vocab_size) if smoothing else None,
            hit=shares * (1 - smoothing),
        )
