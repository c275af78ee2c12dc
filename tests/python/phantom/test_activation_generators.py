"""Random numbers of a device in regions whose arguments lie on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from support.phantom import PhantomOf


class Embedding(nn.Module):
    """Moves its argument to its own device, as the hooks of ``fully_shard`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(16, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids.to(self.embedding.weight.device))
        return F.dropout(self.up(F.dropout(x, 0.5)), 0.5).sin()


def gradients(*, checkpointed: bool) -> list[Tensor]:
    """And what is drawn next."""
    torch.manual_seed(1)
    models = [Embedding().to("phantom") for _ in range(2)]
    if checkpointed:
        for model in models:
            lowtide.checkpoint(model)
    ids = torch.arange(16)
    (models[0](ids) * models[1](ids)).sum().backward()
    drawn = F.dropout(torch.ones(64, device="phantom"), 0.5)
    gradients = [p.grad for m in models for p in m.parameters() if p.grad is not None]
    return [tensor.cpu() for tensor in (*gradients, drawn)]


def differing() -> int:
    plain, ours = gradients(checkpointed=False), gradients(checkpointed=True)
    return sum(not torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_dropout_on_the_modules_device(phantom: PhantomOf) -> None:
    assert phantom("exact").run(differing) == 0
