"""What becomes of forwards that switch streams.

    python side_streams_dry_run.py    prints {what: text}: why weight gradients of
                                      layers on a side stream are not summed in place,
                                      what compiled ones, units and the loss of a
                                      streamed head there raise

Over the dry driver.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.losses import linear_cross_entropy
from support.cuda_steps import start

WIDTH = 128
STEPS = 2


class Forked(nn.Module):
    """One of its layers runs on a stream of its own, beside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            y = self.aside(x)
        z = self.here(x)
        main.wait_stream(self.side)
        return y + z


def step(model: nn.Module) -> None:
    model(torch.zeros(4, WIDTH, device="cuda")).sum().backward()


def of_layers(*, compiled: bool = False) -> str:
    model: Any = Forked().to("cuda")
    if compiled:
        model.aside.compile(backend="aot_eager", fullgraph=True)
    lowtide.fully_shard(model, grads="fused")
    try:
        for _ in range(STEPS):
            step(model)
    except RuntimeError as error:
        return str(error)
    return json.dumps(lowtide.memory_report(model).to_dict()["fused"])


def of_units() -> str:
    model: Any = Forked().to("cuda")
    for unit in (model.here, model.aside, model):
        lowtide.fully_shard(unit)
    try:
        step(model)
    except RuntimeError as error:
        return str(error)
    return "nothing"


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def of_a_streamed_head() -> str:
    """Its loss runs after the model's forward, on a stream that waits for it."""
    model: Any = Headed().to("cuda")
    for unit in (model.head, model):
        lowtide.fully_shard(unit)
    targets = torch.zeros(4, dtype=torch.long, device="cuda")
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        hidden = model(torch.zeros(4, WIDTH, device="cuda"))
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                linear_cross_entropy(
                    hidden, model.head, targets, chunking="vocabulary"
                ).backward()
        except RuntimeError as error:
            return f"{'side' if stream == side else 'same'}: {error}"
    return "nothing"


def main() -> None:
    start()
    found = {
        "layers": of_layers(),
        "compiled": of_layers(compiled=True),
        "units": of_units(),
        "head": of_a_streamed_head(),
    }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
