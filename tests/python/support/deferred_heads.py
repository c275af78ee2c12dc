"""A head and its twin whose logits are deferred, and what a loss of theirs gives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.losses import defer_logits
from lowtide.losses._deferred_logits import DeferredLogits

VOCAB, DIM, BATCH, LENGTH = 37, 12, 3, 8

# How programs reach their loss from [batch, length, vocabulary], and the same of hidden
# and targets.
Program = Callable[[Tensor, Tensor], Tensor]
FLAT: dict[str, Program] = {
    "flatten": lambda z, t: F.cross_entropy(z.flatten(0, 1).float(), t.flatten()),
    "torch.flatten": lambda z, t: F.cross_entropy(torch.flatten(z, 0, 1), t.flatten()),
    "view": lambda z, t: F.cross_entropy(z.float().view(-1, VOCAB), t.view(-1)),
    "view_size": lambda z, t: F.cross_entropy(z.view(-1, z.size(-1)), t.view(-1)),
    "reshape": lambda z, t: F.cross_entropy(
        torch.reshape(z, (-1, VOCAB)).to(torch.float32), t.reshape(-1)
    ),
    "module": lambda z, t: nn.CrossEntropyLoss()(z.flatten(0, -2), t.flatten()),
    "to_device": lambda z, t: F.cross_entropy(
        input=z.to("cpu").contiguous().view(-1, VOCAB), target=t.view(-1)
    ),
}
# How fine-tuning averages over some tokens, and the same of each token's loss.
Each = Callable[[Tensor], Tensor]
MASKED: dict[str, Each] = {
    "mask": lambda each: (each * WEIGHTS.flatten()).sum() / 7,
    "packed": lambda each: each.view(BATCH, LENGTH).mean(1).sum(),
    "picked": lambda each: each[MASK.flatten()].mean(),
    "floor": lambda each: each.clamp(min=3.6).mean(),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1, "ignore_index": 0},
]

MASK = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 3 == 0
WEIGHTS = torch.linspace(0, 2, BATCH * LENGTH).view(BATCH, LENGTH) * MASK
LAST = torch.tensor([2, 5, 7])
# What is done to [batch, length, vocabulary], and alike to hidden -> its tokens' shape.
TOKENS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "shifted": (lambda x: x[..., :-1, :], (BATCH, LENGTH - 1)),
    "leading": (lambda x: x[:, 1:], (BATCH, LENGTH - 1)),
    "sample": (lambda x: x[1], (LENGTH,)),
    "chunk": (lambda x: x.chunk(2, dim=1)[1], (BATCH, LENGTH // 2)),
    "split": (lambda x: torch.split(x, 3, dim=1)[2], (BATCH, 2)),
    "sections": (lambda x: x.split([2, 1], dim=0)[1], (1, LENGTH)),
    "named": (
        lambda x: torch.split(x, split_size_or_sections=4, dim=1)[0],
        (BATCH, 4),
    ),
    "tensor_split": (lambda x: x.tensor_split(3, dim=1)[0], (BATCH, 3)),
    "narrow": (lambda x: x.narrow(1, 2, 3), (BATCH, 3)),
    "narrow_named": (lambda x: torch.narrow(x, dim=-2, start=0, length=2), (BATCH, 2)),
    "select": (lambda x: x.select(0, -1), (LENGTH,)),
    "unbind": (lambda x: torch.unbind(x, 1)[3], (BATCH,)),
    "iterated": (lambda x: [*x][2], (LENGTH,)),
    "transpose": (lambda x: x.transpose(0, 1), (LENGTH, BATCH)),
    "permute": (lambda x: x.permute(1, 0, 2)[1:], (LENGTH - 1, BATCH)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (BATCH, 1, LENGTH)),
    "squeeze": (lambda x: x[:1].squeeze(0), (LENGTH,)),
    "squeeze_all": (lambda x: torch.squeeze(x[:1, None]), (LENGTH,)),
    "view_as": (
        lambda x: x.view_as(torch.empty(LENGTH, BATCH, x.shape[-1])),
        (LENGTH, BATCH),
    ),
    "reshape_as": (lambda x: x.reshape_as(x[None]), (1, BATCH, LENGTH)),
    "unflatten": (lambda x: x.unflatten(1, (2, -1)), (BATCH, 2, LENGTH // 2)),
    "new_dimension": (lambda x: x[:, None, 1:], (BATCH, 1, LENGTH - 1)),
    "mask": (lambda x: x[MASK], (int(MASK.sum()),)),
    "mask_of_samples": (lambda x: x[torch.tensor([True, False, True])], (2, LENGTH)),
    "mask_of_flat": (lambda x: x.flatten(0, 1)[MASK.flatten()], (int(MASK.sum()),)),
    "last_of_each": (lambda x: x[torch.arange(BATCH), LAST], (BATCH,)),
    "some": (lambda x: x[:, LAST], (BATCH, 3)),
    "first_ones": (lambda x: x[:, :LENGTH][..., LAST, :], (BATCH, 3)),
}


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
