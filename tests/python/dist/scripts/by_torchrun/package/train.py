"""A program of FSDP2's that is started as a module; prints what is compared."""

import argparse
import atexit

import torch
import torch.distributed as dist
from bits import digest, say
from leave_at_exit import leave
from torch.distributed.fsdp import fully_shard

from .model import build


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    lr = parser.parse_args().lr
    dist.init_process_group("gloo")
    model = build()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(0, 32, (4, 8))
        loss = torch.nn.functional.cross_entropy(model(tokens).mT, tokens.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say("loss", loss.item())
    say("digest", digest(model.parameters()), "lr", lr)
    atexit.register(leave)


if __name__ == "__main__":
    main()
