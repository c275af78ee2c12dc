"""How public training programs write PaLM's z-loss beside their cross entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FACTOR = 0.05


def wide(z: Tensor) -> Tensor:
    """``z.float()``, but for the reference in fp64."""
    return z if z.dtype == torch.float64 else z.float()


class CrossEntropyWithZLoss(nn.CrossEntropyLoss):
    """As open_lm has it."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        loss = super().forward(input, target)
        return loss + FACTOR * torch.square(torch.logsumexp(input, dim=-1)).mean()


def olmo(z: Tensor, t: Tensor) -> Tensor:
    """Of the next tokens, flat, without ignored ones; two losses that are summed."""
    z, t = wide(z[..., :-1, :].contiguous().flatten(0, 1)), t[..., 1:].flatten()
    loss = F.cross_entropy(z, t)
    squared = z.logsumexp(-1).pow(2) * (t != -100)
    return loss + FACTOR * squared.mean()


def palm(z: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(wide(z).view(-1, z.size(-1)), t.view(-1))
    return loss + FACTOR * torch.logsumexp(wide(z), -1).square().mean()


def kept_dim(z: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(z.flatten(0, 1), t.flatten(), reduction="sum")
    squared = torch.logsumexp(input=z, dim=2, keepdim=True) ** 2
    assert squared.shape == (*z.shape[:-1], 1)
    return loss + FACTOR * squared.sum()


def open_lm(z: Tensor, t: Tensor) -> Tensor:
    return CrossEntropyWithZLoss()(z.reshape(-1, z.shape[-1]), t.reshape(-1))


def before(z: Tensor, t: Tensor) -> Tensor:
    """The cross entropy comes last."""
    squared = torch.special.logsumexp(z, (-1,)).pow(2).mean()
    return FACTOR * squared + F.cross_entropy(z.flatten(0, 1), t.flatten())


def of_other_tokens(z: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(z[:, :-1].flatten(0, 1), t[:, 1:].flatten())
    return loss + FACTOR * z.logsumexp(-1).square().mean()


def alone(z: Tensor, t: Tensor) -> Tensor:
    return z.logsumexp(-1).square().mean()


# One pass over the head in forward and one in backward, as without a z-loss.
SHARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "olmo": olmo,
    "palm": palm,
    "kept_dim": kept_dim,
    "open_lm": open_lm,
    "alone": alone,
}
# A pass of its own for each.
APART = {"before": before, "of_other_tokens": of_other_tokens}
