"""A head and its twin whose logits are deferred, and what a loss of theirs gives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.losses import defer_logits
from lowtide.losses._deferred_logits import DeferredLogits

VOCAB, DIM, BATCH, LENGTH = 37, 12, 3, 8


def heads(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Any, Any]:
    """The plain one and its twin whose logits are deferred."""
    torch.manual_seed(0)
    plain = nn.Linear(DIM, VOCAB, bias=bias, dtype=dtype)
    deferred = copy.deepcopy(plain)
    defer_logits(deferred)
    return plain, deferred


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, DIM, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (BATCH, LENGTH), generator=g)
    targets[0, ::3] = -100
    return hidden, targets


def is_deferred(logits: Tensor) -> bool:
    return isinstance(logits, DeferredLogits) and logits._family.logits is None


def results(loss: Tensor, hidden: Tensor, head: nn.Linear) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()])]


def trained(net: Any, loss_of: Callable[[int], Tensor], count: int) -> dict[str, Any]:
    """Losses of ``count`` steps of a sharded ``net``, the second of which accumulates,
    and its full parameters behind them; what was said meanwhile."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, says = [], []
    for step in range(count):
        net.set_requires_gradient_sync(step != 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = loss_of(step)
        loss.backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        says += [str(one.message) for one in caught]
    full = [parameter.full_tensor().detach() for parameter in net.parameters()]
    return {"numbers": [*losses, *full], "says": says}
