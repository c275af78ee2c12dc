"""A program of accelerate's that leaves it to `accelerate launch` what shards; prints
what is compared."""

import atexit

import torch
from accelerate import Accelerator
from bits import digest, say
from leave_at_exit import leave
from torch import nn

from support.accelerate_on_cpus import accept_cpus


def main() -> None:
    accept_cpus()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(32, 16),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(16, 32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1 + accelerator.process_index)
    for _ in range(3):
        tokens = torch.randint(0, 32, (4, 8))
        with accelerator.autocast():
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.float().mT, tokens.roll(1, 1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        say("loss", loss.item())
    say("digest", digest(model.parameters()))
    accelerator.end_training()
    atexit.register(leave)


if __name__ == "__main__":
    main()
