"""Deferred logits beside torch.compile: whatever is compiled, the head of a sharded
model is called between graphs, and its loss without logits has the eager bits."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
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
from support.deferred_heads import (
    FLAT,
    MASKED,
    SETTINGS,
    TOKENS,
    VOCAB,
    heads,
    inputs,
    results,
)
from support.models import MODELS
from support.z_losses import APART, SHARED, olmo

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


# -- every way to a loss, by hand -----------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]


def of_tokens(choose: Callable[[Tensor], Any], shape: tuple[int, ...]) -> Loss:
    targets = torch.arange(math.prod(shape)) % VOCAB

    def loss(z: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(choose(z).contiguous().view(-1, VOCAB), targets)

    return loss


def with_settings(settings: dict[str, Any]) -> Loss:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), t.flatten().clamp(min=0), **settings)

    return loss


def averaged(average: Callable[[Tensor], Tensor]) -> Loss:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        each = F.cross_entropy(z.flatten(0, 1), t.flatten(), reduction="none")
        return average(each)

    return loss


LOSSES: dict[str, Loss] = {
    **FLAT,
    **{f"tokens' {name}": averaged(average) for name, average in MASKED.items()},
    **{f"tokens {name}": of_tokens(*chosen) for name, chosen in TOKENS.items()},
    **{f"settings {one}": with_settings(one) for one in SETTINGS},
    **{f"z-loss {name}": one for name, one in {**SHARED, **APART}.items()},
}
IN_GRAPH = "a graph of torch.compile that calls the head"


def compiled_loss(name: str, backend: str) -> None:
    """Of logits that were deferred outside of it."""
    _, head = heads()
    hidden, targets = inputs()
    expected = results(LOSSES[name](head(hidden), targets), hidden, head)
    tally = tally_of(head)
    eager = dataclasses.replace(tally)
    loss = torch.compile(LOSSES[name], backend=backend)
    actual = results(loss(head(hidden), targets), hidden, head)
    for mine, wanted in zip(actual, expected, strict=True):
        assert same_bits(mine, wanted)
    assert tally.made.total() == 0 and tally.losses == 2 * eager.losses


def compiled_head(name: str, backend: str, fullgraph: bool) -> None:
    """It is called in the graph, and says so once."""
    plain, head = heads()
    hidden, targets = inputs()

    def compiled(head: Any) -> Callable[[], list[Tensor]]:
        loss = torch.compile(
            lambda x, t: LOSSES[name](head(x), t), backend=backend, fullgraph=fullgraph
        )
        return lambda: results(loss(hidden, targets), hidden, head)

    expected = compiled(plain)()
    run = compiled(head)
    with pytest.warns(UserWarning, match=IN_GRAPH) as caught:
        actual = [run() for _ in range(2)]
    said = [one for one in caught if "lowtide: " in str(one.message)]
    assert [one.filename for one in said] == [__file__]
    for mine, wanted in zip(actual[0], expected, strict=True):
        assert same_bits(mine, wanted)
    # A trace that meets the end of its graph begins again.
    assert set(tally_of(head).made) == {IN_GRAPH}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_compiled_makes_no_logits(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "lowtide: deferred logits")
        compiled_loss(name, "aot_eager")


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_head_that_is_compiled_with_its_loss_says_so(name, fullgraph):
    compiled_head(name, "aot_eager", fullgraph)


@pytest.mark.slow
def test_inductors_code_beside_deferred_logits():
    compiled_loss("view", "inductor")
    compiled_head("view", "inductor", True)
