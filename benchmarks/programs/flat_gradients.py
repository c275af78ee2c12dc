"""Gradients of several microbatches accumulated in fp32 without a reduction: three
variants in plain torch, and lowtide.  As JSON.

    flat_gradients.py per_parameter cat flat lowtide
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide import _C
from lowtide._base.memory import ledger
from support.model import ModelConfig, batch, build, loss_fn

CPU = torch.device("cpu")
# A 32nd of the published widths on one rank of tensor parallel 4: d 8192, ffn 7168,
# vocab 32064, 16 + 2 heads of 128.
CONFIG = ModelConfig(
    dim=256,
    num_layers=1,
    vocab=1002,
    num_heads=16,
    num_kv_heads=2,
    kv_dim=8,
    ffn=224,
    seq=32,
    batch=1,
)
MICROBATCHES = 4


class PerParameter:
    """Each parameter accumulates by itself and is handed over by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.copied = 0
        self.model = model
        self.sums: dict[nn.Parameter, Tensor] = {}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.take)

    def before_step(self) -> None:
        self.sums = {}

    def take(self, p: nn.Parameter) -> None:
        assert p.grad is not None
        if p not in self.sums:
            self.sums[p] = self.count(p.grad.float())
        else:
            self.sums[p] += p.grad
        p.grad = None

    def count(self, result: Tensor) -> Tensor:
        self.copied += result.nbytes
        return result

    def hand_over(self) -> list[Tensor]:
        """Flat, in the order of the parameters; the reduce-scatter's input."""
        return [self.sums[p].flatten() for p in self.model.parameters()]


class Concatenated(PerParameter):
    """Then all are put into one buffer, so that one reduce-scatter takes it."""

    def hand_over(self) -> list[Tensor]:
        return [self.count(torch.cat(super().hand_over()))]


class Flat(PerParameter):
    """One buffer for all, filled with zeros before the first forward."""

    def before_step(self) -> None:
        parameters = list(self.model.parameters())
        self.buffer = torch.zeros(sum(p.numel() for p in parameters))
        slices = self.buffer.split([p.numel() for p in parameters])
        self.sums = dict(zip(parameters, slices, strict=True))
        self.count(self.buffer)

    def take(self, p: nn.Parameter) -> None:
        assert p.grad is not None
        self.sums[p] += p.grad.flatten()
        p.grad = None

    def hand_over(self) -> list[Tensor]:
        return [self.buffer]


VARIANTS: dict[str, Callable[[nn.Module], PerParameter]] = {
    "per_parameter": PerParameter,
    "cat": Concatenated,
    "flat": Flat,
}


def accumulate(model: Any, before: Callable[[int], None] = lambda _: None) -> list[str]:
    """Losses, as exact hexadecimal numbers."""
    losses = []
    for microbatch in range(MICROBATCHES):
        before(microbatch)
        ids, targets = batch(CONFIG, 0, microbatch, 0)
        loss = loss_fn(model(ids), targets) / MICROBATCHES
        loss.backward()
        losses.append(loss.item().hex())
    return losses


def digest(gradients: Iterator[Tensor]) -> str:
    bits = hashlib.sha256()
    for gradient in gradients:
        bits.update(gradient.detach().contiguous().numpy().tobytes())
    return bits.hexdigest()


def accumulate_once(
    model: nn.Module, variant: PerParameter
) -> tuple[list[str], list[Tensor]]:
    variant.before_step()
    losses = accumulate(model)
    handed = variant.hand_over()
    variant.sums = {}
    return losses, handed


def measure_variant(name: str) -> dict[str, Any]:
    model = build(CONFIG).bfloat16()
    variant = VARIANTS[name](model)
    sizes = [p.numel() for p in model.parameters()]
    accumulate_once(model, variant)  # warms up
    variant.copied = 0
    gc.collect()
    with _C.AllocationTimeline(CPU, capacity=1 << 15) as timeline:
        losses, handed = accumulate_once(model, variant)
    flat = torch.cat(handed)
    return {
        "losses": losses,
        "gradients": digest(iter(flat.split(sizes))),
        "peak": timeline.peak()["total"],
        "copied": variant.copied,
        "num_parameters": sum(sizes),
    }


def measure_lowtide() -> dict[str, Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model: Any = build(CONFIG)
    policy = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = (*model.layers, model)
    for module in units:
        lowtide.fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    # The full parameters stay, as they do in the other variants.
    model.set_reshard_after_backward(False)

    def sync_last(microbatch: int) -> None:
        model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)

    losses = accumulate(model, sync_last)
    for module in units:
        module.reshard()
    gradients = digest(p.grad.to_local() for p in model.parameters())
    model.zero_grad()
    for module in units:
        module.unshard()
    # Bytes: up to where the slab is what the reduce-scatter would take.
    model.set_requires_gradient_sync(False)
    gc.collect()
    timeline = _C.AllocationTimeline(CPU, ledger(CPU), capacity=1 << 15)
    with timeline:
        again = accumulate(model)
    assert again == losses
    samples = timeline.samples()
    held = zip(
        samples["total"], samples["parameters"], samples["gathered"], strict=True
    )
    slab = lowtide.memory_report(model).categories["gradient_slab"].peak
    result = {
        "losses": losses,
        "gradients": gradients,
        "peak": max(total - masters - full for total, masters, full in held),
        "slab": slab,
    }
    lowtide.abort_step(model)
    dist.destroy_process_group()
    return result


def main() -> None:
    torch.set_num_threads(1)
    results = {
        name: measure_lowtide() if name == "lowtide" else measure_variant(name)
        for name in sys.argv[1:]
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
