"""Offloaded Llama blocks on CUDA, dry.

python parameter_offload_dry_run.py fsdp2|lowtide   prints bytes of a training and when
                                                    the host waited for the device
python parameter_offload_dry_run.py moves           prints what becomes of a model that
                                                    moves, and of what is refused
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import lowtide
from llama import CONFIGS, Llama, LlamaConfig
from lowtide.losses import linear_cross_entropy
from lowtide.phantom.dry import driver
from support.cuda_steps import start
from support.steady_step_dry_run import host_waits
from support.systems import get_system

NUM_LAYERS = 6
CONFIG = replace(
    CONFIGS["8b"], vocab_size=4096, dim=2048, num_layers=NUM_LAYERS, ffn_dim=4096
)
TOKENS = 2048
STEPS = 3


def offloaded(
    system_name: str, config: LlamaConfig = CONFIG, *, reshard: bool = True
) -> Any:
    system = get_system(system_name)
    with torch.device("meta"):
        model: Any = Llama(config)
    for module in (*model.layers, model):
        system.fully_shard(
            module,
            mp_policy=system.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            offload_policy=lowtide.CPUOffloadPolicy(),
            reshard_after_forward=reshard,
        )
    model.to_empty(device="cpu")
    model.rope = model.rope.to("cuda")
    return model


def forward(model: Any) -> torch.Tensor:
    length = min(TOKENS, model.config.max_seq_len)
    tokens = torch.zeros(1, length, dtype=torch.long, device="cuda")
    return model(tokens).float().square().mean()


def train(system_name: str) -> dict[str, Any]:
    model = offloaded(system_name)
    waits: dict[str, int] = {}

    def tell(when: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            waits[when] = host_waits()

        return note

    def begins(_: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(tell("backward begins"))

    def ends(_: Any, args: Any) -> None:
        args[0].register_hook(tell("backward ends"))

    model.layers[-1].register_forward_hook(begins)
    model.layers[0].register_forward_pre_hook(ends)
    model.layers[0].register_forward_pre_hook(tell("forward begins"))
    model.layers[-1].register_forward_hook(tell("forward ends"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        forward(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    return {
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "held": torch.cuda.memory_allocated(),
        "pinned": driver.peak_pinned(),
        "in forward": waits["forward ends"] - waits["forward begins"],
        "in backward": waits["backward ends"] - waits["backward begins"],
    }


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return str(error)
    return ""


def loss_over_rows() -> str:
    """Where the gradient is of a head whose rows are read from the host."""
    head: Any = torch.nn.Linear(64, 512, bias=False)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), head)
    for module in (head, model):
        lowtide.fully_shard(module, offload_policy=lowtide.CPUOffloadPolicy())
    hidden = torch.zeros(32, 64, device="cuda", requires_grad=True)
    targets = torch.zeros(32, dtype=torch.long, device="cuda")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, head, targets, chunking="vocabulary")

    model.forward = lambda x: loss(model[0](x))
    model(hidden).backward()
    assert hidden.grad is not None and hidden.grad.is_cuda
    device: str = head.weight.grad.device.type
    return device


def moves() -> dict[str, Any]:
    model = offloaded("lowtide", CONFIGS["tiny"], reshard=False)
    found: dict[str, Any] = {"first": bool(forward(model).isfinite())}
    found["of rows"] = loss_over_rows()
    model.to("cuda")  # as verl does to load a state dict
    found["on the device"] = error_of(lambda: forward(model))
    model.to("cpu")
    model.rope = model.rope.to("cuda")
    forward(model).backward()
    shard = next(model.parameters())
    assert isinstance(shard, DTensor) and isinstance(shard.grad, DTensor)
    found["pinned"] = [
        shard.to_local().is_pinned(),
        shard.grad.to_local().is_pinned(),
    ]
    norm = lowtide.clip_grad_norm_(model.parameters(), 1.0)
    found["norm"] = norm.device.type
    lowtide.sleep(model)
    lowtide.wake(model)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            forward(model)

    model.reshard()
    found["captured"] = error_of(capture)
    return found


def main(what: str) -> None:
    start()
    found = moves() if what == "moves" else train(what)
    print(json.dumps(found))
    torch.cuda.synchronize()  # nothing is under way where the groups end
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-1])
