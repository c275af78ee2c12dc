"""Compiled blocks of a model with ``grads="fused"``: one graph, no recompilation per
layer, the exact mode's bits, and the report says that compiled calls stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import lowtide

DIM = 8


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def trained(grads: str, backend: str = "") -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(DIM, DIM))
    for block in model[:3]:
        if backend:
            block.compile(backend=backend, fullgraph=True)
        lowtide.fully_shard(block, grads=grads)
    lowtide.fully_shard(model, grads=grads)
    generator = torch.Generator().manual_seed(1)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model(torch.randn(4, DIM, generator=generator)).pow(2).sum().backward()
    return model, [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_stay_exact_and_are_counted(backend):
    counters.clear()
    _, expected = trained("exact", backend)
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    model, gradients = trained("fused", backend)
    for gradient, other in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, other)
    # One for the first block, whose input needs no gradient, one for the others:
    # nothing of a layer is baked into it.
    assert counters["stats"]["unique_graphs"] == graphs == 2
    report = lowtide.memory_report(model).fused
    assert report is not None
    assert "3.weight" not in report.exact
    assert report.exact == {
        f"{block}.{name}.weight": "torch.compile, or not by its layer's forward "
        "(3 uses)"
        for block in range(3)
        for name in ("up", "down")
    }
