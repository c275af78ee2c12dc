"""Blocks compiled with fullgraph train with lowtide to the same bits, in one graph,
whether they were compiled before or after sharding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import lowtide
from support.model import ModelConfig, batch, build, loss_fn
from support.training import adamw, local_params

CONFIG = ModelConfig(num_layers=2)


pytestmark = pytest.mark.usefixtures("one_rank")


def wrapper(model: nn.Module, backend: str) -> None:
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        assert isinstance(compiled, nn.Module)
        layers[i] = compiled


def in_place(model: nn.Module, backend: str) -> None:
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)


def train(
    *, before: object = None, after: object = None, backend: str = ""
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(CONFIG)
    if callable(before):
        before(model, backend)
    policy = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        lowtide.fully_shard(layer, mp_policy=policy)
    lowtide.fully_shard(model, mp_policy=policy)
    if callable(after):
        after(model, backend)
    optimizer = adamw(model, foreach=False)
    losses = []
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            ids, targets = batch(CONFIG, step, 0, 0)
            loss = loss_fn(model(ids), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {
        name.replace("_orig_mod.", ""): value
        for name, value in local_params(model).items()
    }


@pytest.mark.parametrize("how", ["wrapper", "in_place_before", "in_place_after"])
def test_one_graph_and_the_same_bits(how: str) -> None:
    expected = train()
    torch._dynamo.reset()
    counters.clear()
    hooks = {
        "wrapper": {"before": wrapper},
        "in_place_before": {"before": in_place},
        "in_place_after": {"after": in_place},
    }[how]
    losses, params = train(**hooks, backend="aot_eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert losses == expected[0]
    for name, value in params.items():
        assert torch.equal(value, expected[1][name]), name


@pytest.mark.parametrize(
    "activations",
    [{}, {"save": ["layers.*.w1"]}, {"offload": ["input"]}],
    ids=str,
)
def test_a_compiled_model_of_checkpointed_blocks(
    activations: dict[str, list[str]],
) -> None:
    """Hooks of sharded blocks are not traced: the regions run beside the graph."""

    def checkpointed(model: nn.Module, backend: str) -> None:
        for layer in model.layers:
            lowtide.checkpoint(layer, lowtide.ActivationPolicy(**activations))

    def whole(model: nn.Module, backend: str) -> None:
        model.compile(backend=backend)

    expected = train()
    torch._dynamo.reset()
    losses, params = train(before=checkpointed, after=whole, backend="aot_eager")
    assert losses == expected[0]
    for name, value in params.items():
        assert torch.equal(value, expected[1][name]), name


def test_what_is_sharded_elsewhere_compiles_nothing_again() -> None:
    """transformers' models call a slice of their layers, which is a new ModuleList:
    whoever watches registrations is traced with it."""
    sharded = [lowtide.fully_shard(nn.Linear(4, 4))]
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers[:2]:
            x = layer(x)
        return x

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(torch.ones(1, 4))
        sharded.append(lowtide.fully_shard(nn.Linear(4, 4)))
        compiled(torch.ones(1, 4))
        sharded.clear()
        compiled(torch.ones(1, 4))
