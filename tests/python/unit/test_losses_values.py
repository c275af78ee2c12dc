"""The loss and its gradients are those of torch's cross entropy of all logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.losses import linear_cross_entropy
from support.losses import CASES, Case, gradients, plain_loss

CHUNKINGS = [
    pytest.param({"chunking": "vocabulary", "vocab_chunk": 8}, id="vocabulary"),
    pytest.param({"chunking": "tokens"}, id="tokens"),
]
# Largest difference, relative to the largest number of a tensor. In bf16 both sides
# round logits and the gradient with respect to them in the same places; what differs
# is the rounding of sums.
BOUNDS = {
    torch.float64: (1e-14, 1e-14),
    torch.float32: (1e-6, 3e-6),
    torch.bfloat16: (1e-6, 2**-6),
    torch.float16: (1e-6, 2**-9),
}
DTYPES = list(BOUNDS)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max())


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch(case, dtype, chunks):
    case = replace(case, dtype=dtype)
    leaves, targets = case.tensors()
    loss = linear_cross_entropy(
        **leaves, targets=targets, token_chunk=7, **chunks, **case.settings
    )
    expected = plain_loss(leaves, targets, case)
    assert loss.shape == () and loss.dtype == expected.dtype
    loss_bound, gradient_bound = BOUNDS[dtype]
    assert relative(loss.detach(), expected.detach()) <= loss_bound
    found, wanted = gradients(loss, leaves), gradients(expected, leaves)
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        assert relative(gradient, wanted[name]) <= gradient_bound, name
    assert not found["hidden"][targets == case.ignore_index].any()


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case, chunks):
    case = replace(case, tokens=6, features=3, vocab_size=11, dtype=torch.float64)
    leaves, targets = case.tensors()

    def loss(hidden, weight, bias=None):
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            token_chunk=4,
            **(chunks | ({"vocab_chunk": 4} if "vocab_chunk" in chunks else {})),
            **case.settings,
        )

    assert torch.autograd.gradcheck(loss, tuple(leaves.values()))


def weighted(loss: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """As losses of some tokens are averaged: a third of them, by weights."""
    weights = torch.linspace(-1, 2, len(loss), dtype=loss.dtype)
    weights[torch.arange(len(loss)) % 3 == 1] = 0
    return (loss * weights).sum() * scale


# Without a reduction, each setting alone and all together.
EACH = [replace(case, reduction="none") for case in CASES if case.reduction == "sum"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_the_loss_of_each_token_equals_torchs(case, dtype):
    case = replace(case, dtype=dtype)
    leaves, targets = case.tensors()
    loss = linear_cross_entropy(
        **leaves, targets=targets, token_chunk=7, vocab_chunk=8, **case.settings
    )
    expected = plain_loss(leaves, targets, case)
    assert loss.shape == expected.shape and loss.dtype == expected.dtype
    assert not loss[targets == case.ignore_index].any()
    loss_bound, gradient_bound = BOUNDS[dtype]
    assert relative(loss.detach(), expected.detach()) <= loss_bound
    # fp16 as it is trained: torch's gradients would underflow, ours would not.
    scale = 256.0 if dtype == torch.float16 else 1.0
    found = gradients(weighted(loss, scale), leaves)
    wanted = gradients(weighted(expected, scale), leaves)
    for name, gradient in found.items():
        assert relative(gradient, wanted[name]) <= gradient_bound, name


@pytest.mark.parametrize("case", EACH, ids=str)
def test_gradcheck_of_each_token(case):
    case = replace(case, tokens=6, features=3, vocab_size=11, dtype=torch.float64)
    leaves, targets = case.tensors()

    def loss(hidden, weight, bias=None):
        return linear_cross_entropy(
            *(hidden, weight, targets),
            bias=bias,
            token_chunk=4,
            vocab_chunk=4,
            **case.settings,
        )

    assert torch.autograd.gradcheck(loss, tuple(leaves.values()))


def test_each_token_has_its_place_and_an_ignored_one_no_gradient():
    """Whatever gradient comes to its loss."""
    case = Case(tokens=24, reduction="none")
    leaves, targets = case.tensors()
    hidden, shape = leaves["hidden"], (case.tokens // 2, 2)
    loss = linear_cross_entropy(
        hidden.view(*shape, -1), leaves["weight"], targets.view(shape), reduction="none"
    )
    assert loss.shape == shape
    incoming = torch.where(targets == -100, torch.nan, 1.0).view(shape)
    (found,) = torch.autograd.grad(loss, hidden, incoming)
    expected = plain_loss(leaves, targets, replace(case, reduction="sum"))
    torch.testing.assert_close(found, torch.autograd.grad(expected, hidden)[0])


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_token_to_count_has_no_gradients_without_a_reduction(tokens):
    case = Case(tokens=tokens, bias=True, reduction="none")
    leaves, targets = case.tensors()
    targets.fill_(-100)
    loss = linear_cross_entropy(**leaves, targets=targets, **case.settings)
    assert torch.equal(loss, torch.zeros(tokens))
    for gradient in gradients(loss.sum(), leaves).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("chunks", CHUNKINGS)
def test_fp32_statistics_and_sums_keep_bf16_close_to_the_truth(chunks):
    """Many tokens and chunks: bf16 sums would drift by more than one rounding."""
    case = Case(tokens=512, vocab_size=256, dtype=torch.bfloat16)
    leaves, targets = case.tensors()
    loss = linear_cross_entropy(
        **leaves, targets=targets, token_chunk=64, **chunks, **case.settings
    )
    exact = {name: leaf.detach().double() for name, leaf in leaves.items()}
    logits = F.linear(exact["hidden"], exact["weight"]).to(torch.bfloat16).double()
    truth = F.cross_entropy(logits, targets)
    assert abs(float(loss.detach()) / float(truth) - 1) < 1e-6


@pytest.mark.parametrize("chunks", CHUNKINGS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [0, 4])
def test_no_token_to_count_gives_what_torch_gives(chunks, reduction, smoothing, tokens):
    case = Case(
        tokens=tokens, bias=True, label_smoothing=smoothing, reduction=reduction
    )
    leaves, targets = case.tensors()
    targets.fill_(-100)
    loss = linear_cross_entropy(**leaves, targets=targets, **chunks, **case.settings)
    expected = plain_loss(leaves, targets, case)
    torch.testing.assert_close(loss, expected, equal_nan=True, rtol=0, atol=0)
    assert torch.isnan(loss) == (reduction == "mean")
    for gradient in gradients(loss, leaves).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("chunks", CHUNKINGS)
def test_an_ignore_index_may_be_a_class(chunks):
    case = Case(ignore_index=3, label_smoothing=0.1)
    leaves, targets = case.tensors()
    assert (targets == 3).sum() >= 5
    loss = linear_cross_entropy(**leaves, targets=targets, **chunks, **case.settings)
    expected = plain_loss(leaves, targets, case)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("chunks", CHUNKINGS)
def test_large_logits_and_classes_ruled_out_by_the_bias(chunks):
    """All classes of the first chunk have probability zero."""
    case = Case(bias=True)
    leaves, targets = case.tensors()
    with torch.no_grad():
        leaves["hidden"].mul_(1000)
        # Exact logits: one of 10^4 that is rounded in another order moves its
        # probability by a thousandth.
        for leaf in leaves.values():
            leaf.mul_(16).round_().div_(16)
        leaves["bias"][:8] = -torch.inf
    targets[targets.ne(-100)] = targets[targets.ne(-100)].clamp(min=8)
    loss = linear_cross_entropy(**leaves, targets=targets, **chunks, **case.settings)
    expected = plain_loss(leaves, targets, case)
    assert torch.isfinite(loss) and loss > 100
    torch.testing.assert_close(loss, expected)
    found, wanted = gradients(loss, leaves), gradients(expected, leaves)
    for name in ("hidden", "weight", "bias"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", CHUNKINGS)
def test_any_number_of_leading_dimensions_and_strides(chunks):
    head = nn.Linear(12, 37)
    hidden = torch.randn(3, 12, 5, requires_grad=True)
    targets = torch.randint(37, (5, 3))
    states = hidden.transpose(1, 2).transpose(0, 1)  # [5, 3, 12]
    loss = linear_cross_entropy(states, head, targets.contiguous(), **chunks)
    loss.backward()
    assert hidden.grad is not None
    found, hidden.grad = hidden.grad, None
    F.cross_entropy(head(states).flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(found, hidden.grad)


def test_chunk_sizes_do_not_change_the_values():
    case = Case(tokens=64, vocab_size=64, dtype=torch.float64)
    leaves, targets = case.tensors()
    expected = plain_loss(leaves, targets, case)
    wanted = gradients(expected, leaves)
    for tokens, rows in ((1, 1), (64, 64), (1000, 1000), (5, 64), (63, 17)):
        for chunks in (
            {"vocab_chunk": rows},
            {"chunking": "tokens"},
        ):
            loss = linear_cross_entropy(
                **leaves, targets=targets, token_chunk=tokens, **chunks
            )
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(gradients(loss, leaves), wanted)
