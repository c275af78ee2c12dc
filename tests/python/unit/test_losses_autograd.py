"""The loss among autograd's features: what needs a gradient, retain_graph,
checkpointing, autocast, torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from lowtide.losses import _operators, linear_cross_entropy
from lowtide.losses._autograd import loss_of_rows
from support.bits import assert_same_tensors
from support.losses import Case, StridedRows, gradients, plain_loss

CHUNKINGS = ("vocabulary", "tokens")
LEAVES = ("hidden", "weight", "bias")


def loss_of(leaves: dict[str, Tensor], targets: Tensor, chunking: str) -> Tensor:
    return linear_cross_entropy(
        **leaves, targets=targets, chunking=chunking, token_chunk=8
    )


def rows_loss(leaves: dict[str, Tensor], targets: Tensor, _: str) -> Tensor:
    rows = StridedRows(leaves["weight"], world_size=2, rows_per_rank=4)
    objective = Case().objective
    bias = leaves.get("bias")
    loss, _ = loss_of_rows(
        leaves["hidden"], leaves["weight"], bias, targets, rows, objective
    )
    return loss


WAYS = [
    pytest.param(loss_of, "vocabulary", id="vocabulary"),
    pytest.param(loss_of, "tokens", id="tokens"),
    pytest.param(rows_loss, "", id="rows"),
]


@pytest.mark.parametrize(("loss_fn", "chunking"), WAYS)
@pytest.mark.parametrize(
    "trained",
    [names for n in range(4) for names in itertools.combinations(LEAVES, n)],
    ids=lambda names: "-".join(names) or "nothing",
)
def test_what_is_frozen_gets_no_gradient(loss_fn, chunking, trained):
    leaves, targets = Case(bias=True).tensors()
    whole = loss_fn(leaves, targets, chunking)
    expected = gradients(whole, leaves)
    for name in LEAVES:
        leaves[name].requires_grad_(name in trained)
    loss = loss_fn(leaves, targets, chunking)
    assert torch.equal(loss, whole)
    assert loss.requires_grad == bool(trained)
    found = gradients(loss, leaves) if trained else {}
    assert_same_tensors(found, {name: expected[name] for name in trained}, "trained")


@pytest.mark.parametrize(("loss_fn", "chunking"), WAYS)
def test_no_grad(loss_fn, chunking):
    leaves, targets = Case(bias=True).tensors()
    expected = loss_fn(leaves, targets, chunking)
    with torch.no_grad():
        loss = loss_fn(leaves, targets, chunking)
    assert torch.equal(loss, expected) and not loss.requires_grad


@pytest.mark.parametrize(("loss_fn", "chunking"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_retain_graph_gives_the_same_bits_again(loss_fn, chunking, dtype):
    leaves, targets = Case(dtype=dtype).tensors()
    loss = loss_fn(leaves, targets, chunking)
    inputs = list(leaves.values())
    first = torch.autograd.grad(loss / 3, inputs, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss / 3, inputs)
    for one, other, before in zip(first, second, kept, strict=True):
        assert torch.equal(one, before) and torch.equal(other, before)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize(("loss_fn", "chunking"), WAYS)
def test_create_graph_is_refused(loss_fn, chunking):
    leaves, targets = Case().tensors()
    loss = loss_fn(leaves, targets, chunking)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    assert str(error.value) == (
        "lowtide: linear_cross_entropy: expected a backward without create_graph, got "
        "create_graph=True. Use torch.nn.functional.cross_entropy on the logits where "
        "second derivatives are needed."
    )


@pytest.mark.parametrize(("loss_fn", "chunking"), WAYS)
def test_an_input_changed_in_place_is_noticed(loss_fn, chunking):
    """Also by ``tokens``, which has its gradients already: then nothing is wrong."""
    leaves, targets = Case().tensors()
    loss = loss_fn(leaves, targets, chunking)
    expected = gradients(loss_fn(leaves, targets, chunking), leaves)
    with torch.no_grad():
        leaves["hidden"].add_(1)
    if chunking == "tokens":
        assert_same_tensors(gradients(loss, leaves), expected, "from forward")
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(loss, leaves)


@pytest.mark.parametrize(("loss_fn", "chunking"), WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_it(loss_fn, chunking, reentrant):
    leaves, targets = Case().tensors()

    def region(hidden: Tensor, weight: Tensor) -> Tensor:
        states = {"hidden": torch.tanh(hidden), "weight": weight}
        return loss_fn(states, targets, chunking)

    inputs = list(leaves.values())
    expected = region(*inputs)
    loss = checkpoint(region, *inputs, use_reentrant=reentrant)
    assert torch.equal(loss, expected)
    loss.backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    wanted = dict(zip(leaves, torch.autograd.grad(expected, inputs), strict=True))
    assert_same_tensors(found, wanted, "checkpointed")


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_logits_in_its_dtype(chunking, hidden_dtype):
    """fp32 masters and gradients, as F.linear under autocast."""
    case = Case(tokens=64, bias=True)
    leaves, targets = case.tensors()
    leaves["hidden"] = leaves["hidden"].detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(leaves, targets, chunking)
        expected = plain_loss(leaves, targets, case)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    found, wanted = gradients(loss, leaves), gradients(expected, leaves)
    for name, leaf in leaves.items():
        assert found[name].dtype == leaf.dtype
        bound = 2**-6 * float(wanted[name].abs().max())
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=bound)


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_autocast_leaves_fp64_alone(chunking):
    leaves, targets = Case(dtype=torch.float64).tensors()
    expected = loss_of(leaves, targets, chunking)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss_of(leaves, targets, chunking), expected)


@pytest.mark.parametrize("chunking", [*CHUNKINGS, "each token"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_in_one_graph_with_the_same_bits(chunking, autocast):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    body, head = nn.Linear(8, 16), nn.Linear(16, 40)

    def loss_fn(x: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(body(x))
        if chunking == "each token":
            each = linear_cross_entropy(
                hidden, head, targets, reduction="none", token_chunk=5
            )
            return (each * targets).sum() / 40
        return 2 * linear_cross_entropy(
            hidden, head, targets, chunking=chunking, token_chunk=5
        )

    def train(fn: Callable[..., Tensor], length: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(length)
        x = torch.randn(2, length, 8, generator=g)
        targets = torch.randint(40, (2, length), generator=g)
        for module in (body, head):
            module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = fn(x, targets)
        loss.backward()
        found = {"loss": loss.detach()}
        for name, module in (("body", body), ("head", head)):
            for of, parameter in module.named_parameters():
                assert parameter.grad is not None
                found[f"{name}.{of}"] = parameter.grad.clone()
        return found

    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    for length in (6, 9, 11):  # the second compiles for any length
        assert_same_tensors(train(compiled, length), train(loss_fn, length), "compiled")
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("bias", [False, True])
def test_operators_pass_torchs_own_checks(bias):
    case = Case(bias=bias, tokens=6, features=4, vocab_size=9)
    leaves, targets = case.tensors()
    inputs = (leaves["hidden"], leaves["weight"], leaves.get("bias"), targets)
    settings = (torch.float32, -100, 0.1, 1e-3, "mean", 4)
    each = (torch.float32, -100, 0.1, 1e-3, "none", 4)
    needs = (True, True, bias)
    for operator, args in (
        (_operators.loss_by_vocabulary, (*inputs, *settings, 4)),
        (_operators.loss_by_vocabulary, (*inputs, *each, 4)),
        (_operators.loss_by_tokens, (*inputs, *settings, *needs)),
    ):
        torch.library.opcheck(operator, args)
    detached = [None if t is None else t.detach() for t in inputs]
    _, *saved = _operators.loss_by_vocabulary(*detached, *settings, 4)
    for grad_loss, given in ((torch.ones(()), settings), (torch.ones(6), each)):
        for grad_total in (None, torch.ones(6)):
            grads = (grad_loss, grad_total)
            backward = (*grads, *saved, *detached, *given, 4, *needs)
            torch.library.opcheck(_operators._gradients, backward)
    torch.library.opcheck(_operators._scale, (torch.randn(3), torch.ones(())))
