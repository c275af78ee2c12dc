"""Deferred logits beside torch.compile: whatever is compiled, the head of a sharded
model is called between graphs, and its loss without logits has the eager bits."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from lowtide.losses import defer_logits
from lowtide.losses._heads import tally_of
from support.bits import same_bits
from support.models import MODELS
from support.z_losses import olmo

STEPS = 3


pytestmark = pytest.mark.usefixtures("one_rank")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def inside(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def outside(model: Any, ids: Tensor) -> Tensor:
    return cross_entropy(model(input_ids=ids, use_cache=False).logits, ids)


def in_graph(model: Any, ids: Tensor) -> Tensor:
    """As torchtitan compiles it."""
    loss = torch.compile(cross_entropy, backend="aot_eager")
    return loss(model(input_ids=ids, use_cache=False).logits, ids)


def nothing(model: Any) -> Any:
    return model


def whole(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def blocks(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def head(model: Any) -> Any:
    model.lm_head.compile(backend="aot_eager")
    return model


def train(
    name: str, compiled: Callable[[Any], Any], loss_of: Callable[[Any, Tensor], Tensor]
) -> list[Tensor]:
    torch.manual_seed(0)
    model = MODELS[name].build()
    with contextlib.redirect_stdout(io.StringIO()):
        lowtide.wrap(model)
    run = compiled(model)
    ids = torch.arange(12).view(2, 6)
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "lowtide: deferred logits")
        for _ in range(STEPS):
            losses.append(loss_of(run, ids))
            losses[-1].backward()
    tally = tally_of(model.lm_head)
    assert (tally.calls, tally.losses, tally.made.total()) == (STEPS, STEPS, 0)
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    return [*(loss.detach() for loss in losses), *gradients]


@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
@pytest.mark.parametrize("loss_of", [inside, outside])
@pytest.mark.parametrize("compiled", [whole, in_place, blocks, head])
def test_the_loss_of_a_compiled_model_needs_no_logits(compiled, loss_of, name):
    expected = train(name, nothing, loss_of)
    for mine, wanted in zip(train(name, compiled, loss_of), expected, strict=True):
        assert same_bits(mine, wanted)


def with_z_loss(model: Any, ids: Tensor) -> Tensor:
    return olmo(model(input_ids=ids, use_cache=False).logits, ids)


def with_z_loss_in_graph(model: Any, ids: Tensor) -> Tensor:
    loss = torch.compile(olmo, backend="aot_eager")
    return loss(model(input_ids=ids, use_cache=False).logits, ids)


@pytest.mark.parametrize("loss_of", [with_z_loss, with_z_loss_in_graph])
@pytest.mark.parametrize("compiled", [nothing, whole])
def test_a_z_loss_needs_no_logits(compiled, loss_of):
    expected = train("llama", nothing, with_z_loss)
    for mine, wanted in zip(train("llama", compiled, loss_of), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("compiled", [nothing, blocks])
def test_a_compiled_loss_needs_no_logits(compiled):
    expected = train("llama", nothing, outside)
    for mine, wanted in zip(train("llama", compiled, in_graph), expected, strict=True):
        assert same_bits(mine, wanted)


def test_a_graph_that_has_to_be_whole_says_so():
    layer = torch.nn.Linear(8, 20)
    defer_logits(layer)
    loss = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="DeferredLogits"):
        loss(layer(torch.randn(2, 3, 8)), torch.zeros(2, 3, dtype=torch.int64))
