"""What becomes of forwards that switch streams.

    python side_streams_dry_run.py    prints {what: text}: why weight gradients of
                                      layers on a side stream are not summed in place,
                                      what compiled ones and units there raise

Over the stub.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
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


def main() -> None:
    start()
    found = {
        "layers": of_layers(),
        "compiled": of_layers(compiled=True),
        "units": of_units(),
    }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
