"""One training step of a stack of checkpointed blocks: bytes on the device and on the
host, time, and a digest of loss and gradients.  As JSON.

    residual_offload.py SYSTEM NUM_LAYERS ROWS WIDTH PREFETCH [DEVICE]
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lowtide
from lowtide import _C, ActivationPolicy
from lowtide._base.memory import ledger

STEPS = 3
POLICIES = {
    "nothing named": {},
    "save hidden": {"save": ["hidden"]},
    "offload hidden": {"offload": ["hidden"]},
    "offload residual": {"offload": ["residual"]},
    "offload both": {"offload": ["residual", "hidden"]},
}


class Block(nn.Module):
    """The two named values have as many bytes each, as in the report."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = lowtide.tag(x, "residual")
        h = lowtide.tag(self.up(self.norm(x)), "hidden")
        return x + self.down(F.gelu(h))


class HostCopies:
    """``save_on_cpu``'s hooks, which count what they hold on the host. On a CPU torch's
    would save the tensor itself: these copy it where the device's allocator does not
    count it."""

    def __init__(self) -> None:
        self.live = 0

    def pack(self, x: Tensor) -> tuple[Tensor, torch.device]:
        if x.numel() == 0:
            return x, x.device
        if x.device.type == "cpu":
            owner = np.empty(x.nbytes, dtype=np.uint8)
            host = torch.from_numpy(owner).view(x.dtype).view(x.shape)
        else:
            owner = host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x)
        self.live += x.nbytes
        weakref.finalize(owner, self._freed, x.nbytes)
        return host, x.device

    def _freed(self, num_bytes: int) -> None:
        self.live -= num_bytes

    def unpack(self, packed: tuple[Tensor, torch.device]) -> Tensor:
        host, device = packed
        return host.to(device, copy=True)


def stock(block: nn.Module, context_fn: Callable[[], Any] | None, x: Tensor) -> Tensor:
    extra = {"context_fn": context_fn} if context_fn else {}
    return checkpoint(block, x, use_reentrant=False, **extra)


def offload_everything() -> Any:
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD
    )


class Model(nn.Module):
    def __init__(self, system: str, num_layers: int, width: int, prefetch: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_layers)])
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.copies = HostCopies()
        self.calls: list[Callable[[Tensor], Tensor]] = list(self.blocks)
        if system in POLICIES:
            policy = ActivationPolicy(**POLICIES[system], prefetch=prefetch)
            for block in self.blocks:
                lowtide.checkpoint(block, policy)
        elif system != "no checkpoint":
            context_fn = offload_everything if "SAC" in system else None
            self.calls = [partial(stock, block, context_fn) for block in self.blocks]
        if "save_on_cpu" in system:
            self.around = lambda: torch.autograd.graph.saved_tensors_hooks(
                self.copies.pack, self.copies.unpack
            )

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            for call in self.calls:
                x = call(x)
        return x

    def host_live(self) -> int:
        report = None
        if any(type(block) is not Block for block in self.blocks):
            report = lowtide.memory_report(self).activations
        return report.host_live if report else self.copies.live


def digest(tensors: list[Tensor]) -> str:
    bits = hashlib.sha256()
    for tensor in tensors:
        bits.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()


def measure(
    system: str, num_layers: int, rows: int, width: int, prefetch: int, device: str
) -> dict[str, Any]:
    at = torch.device(device)
    model = Model(system, num_layers, width, prefetch).to(at)
    generator = torch.Generator().manual_seed(2)
    embedded = torch.randn(rows, width, generator=generator).to(at).requires_grad_()
    held = host = peak = 0
    seconds, digests = [], []
    for step in range(STEPS):
        model.zero_grad()
        embedded.grad = None
        gc.collect()
        timeline = _C.AllocationTimeline(at, ledger(at), capacity=1 << 16)
        start = time.process_time()
        with timeline:
            loss = model(embedded * 1.0).square().mean()
            held = timeline.samples()["total"][-1]
            host = model.host_live()
            loss.backward(retain_graph=step == 1)
            if step == 1:
                model.zero_grad()
                embedded.grad = None
                loss.backward()
        seconds.append(time.process_time() - start)
        peak = timeline.peak()["total"]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        digests.append(digest([loss, embedded.grad, *gradients]))
        del loss
    return {
        "held": held,
        "host": host,
        "peak": peak,
        "residual": rows * width * 4,
        "seconds": statistics.median(seconds),
        "digests": digests,
    }


def main() -> None:
    torch.set_num_threads(1)
    system, *numbers = sys.argv[1:6]
    device = sys.argv[6] if len(sys.argv) > 6 else "cpu"
    num_layers, rows, width, prefetch = map(int, numbers)
    print(json.dumps(measure(system, num_layers, rows, width, prefetch, device)))


if __name__ == "__main__":
    main()
