"""What a model has learned: validation loss, generated text, a hash of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PROMPT = b"\n\ndef "


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    batch_size: int,
    played_ranks: Sequence[int],
    num_ranks: int,
) -> float:
    """Mean over all windows; each rank takes its share.  A collective.

    `played_ranks` are the ranks this process stands for.
    """
    means = []
    for rank in played_ranks:
        share = slice(rank, None, num_ranks)
        batches = zip(
            inputs[share].split(batch_size),
            targets[share].split(batch_size),
            strict=True,
        )
        losses = [next_byte_loss(model(x), y).double() * len(x) for x, y in batches]
        means.append(torch.stack(losses).sum() / len(inputs[share]))
    mine = torch.stack(means)
    by_rank = mine.new_empty(num_ranks)
    dist.all_gather_into_tensor(by_rank, mine)
    return by_rank.mean().item()


@torch.no_grad()
def generate(
    model: nn.Module,
    *,
    num_bytes: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and what follows; the same on every rank.  A collective.

    `context`: how many bytes back the model looks.
    """
    random = torch.Generator().manual_seed(seed)
    written = bytearray(PROMPT)
    for _ in range(num_bytes):
        window = torch.tensor([list(written[-context:])], device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature > 0:
            chances = torch.softmax(logits / temperature, 0)
            written.append(int(torch.multinomial(chances, 1, generator=random)))
        else:
            written.append(int(logits.argmax()))
    return printable(written)


def printable(written: bytes) -> str:
    """Without what would steer a terminal."""
    text = written.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def parameters_sha256(model: nn.Module) -> str:
    """Equal for two models exactly when names and bits are.  A collective."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(name.encode())
        # A tensor that numpy has seen can not be resized any more: hash a copy.
        copy = full.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(copy.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
