"""What `fully_shard` moves to the device, and what becomes of a model that moves, dry.

python device_moves_dry_run.py fsdp2|lowtide   prints where things are
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.cuda_steps import start
from support.systems import System, get_system

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x)) + self.offset
        return y


def places(model: nn.Module) -> dict[str, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.device.type for name, tensor in named}


def made_on_the_host(system: System) -> Any:
    model: Any = Net()
    ignored = {model.second.weight, model.second.bias}
    system.fully_shard(model, ignored_params=ignored)
    before = places(model)
    model.to("cuda")
    return [before, places(model)]


def given_on_the_host(system: System) -> list[str]:
    """To a root without parameters, nested and by name."""
    seen: list[str] = []

    class Nothing(nn.Module):
        def forward(self, x: Any, pair: Any, *, more: Any) -> Any:
            tensors = (x, *pair, more["key"][0])
            seen.extend(each.device.type for each in tensors)
            return tensors

    model: Any = system.fully_shard(Nothing())
    one = torch.ones(3)
    outputs = model(one, (one, one), more={"key": [one]})
    return [*seen, *(each.device.type for each in outputs)]


def facts(model: Any) -> list[Any]:
    return [
        [p.device.type, str(p.dtype), str(p.grad_dtype)]
        + [None if p.grad is None else [p.grad.device.type, str(p.grad.dtype)]]
        for p in model.parameters()
    ]


def moved(system: System, storage: torch.dtype, grad_dtype: Any) -> list[Any]:
    """There and back, with gradients, then trained on."""
    model: Any = Net().to("cuda", storage)
    if grad_dtype is not None:
        for p in model.parameters():
            p.grad_dtype = grad_dtype
    system.fully_shard(model.first)
    system.fully_shard(model)
    x = torch.ones(2, 8, device="cuda", dtype=storage)
    model(x).sum().backward()
    kept, found = list(model.parameters()), [facts(model)]
    model.cpu()
    found.append(facts(model))
    found.append(all(a is b for a, b in zip(kept, model.parameters(), strict=True)))
    model.to("cuda")
    found.append(facts(model))
    model(x).sum().backward()
    found.append(facts(model))
    return found


def waiting(system: System) -> str:
    """A microbatch's gradients wait for a reduction while the model moves."""
    model: Any = Net().to("cuda")
    system.fully_shard(model)
    x = torch.ones(2, 8, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    try:
        model.cpu()
        model.to("cuda")
        model.set_requires_gradient_sync(True)
        model(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return str(facts(model))


def main(name: str) -> None:
    start()
    system = get_system(name)
    found = {
        "made on the host": made_on_the_host(system),
        "given on the host": given_on_the_host(system),
        "moved": [
            moved(system, storage, grad_dtype)
            for storage, grad_dtype in ((FP32, None), (BF16, FP32), (FP32, FP32))
        ],
        "waiting": waiting(system),
    }
    print(json.dumps(found))
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-1])
