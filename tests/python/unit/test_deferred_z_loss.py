"""A program's own z-loss of deferred logits: ``logsumexp`` without logits, in the pass
and the backward of the cross entropy of the same tokens."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.losses import _vocabulary_chunks, defer_logits, linear_cross_entropy
from support.bits import same_bits
from support.deferred_heads import (
    BATCH,
    DIM,
    LENGTH,
    VOCAB,
    heads,
    inputs,
    is_deferred,
    results,
)
from support.z_losses import APART, FACTOR, SHARED, olmo, palm


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Nothing is made but where a test expects it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """Each pass over the rows of a head."""
    seen: list[str] = []
    one_pass = _vocabulary_chunks._one_pass

    def counted(*args: Any, backward: bool) -> Any:
        seen.append("backward" if backward else "forward")
        return one_pass(*args, backward=backward)

    monkeypatch.setattr(_vocabulary_chunks, "_one_pass", counted)
    return seen


@pytest.mark.parametrize("name", [*SHARED, *APART])
@pytest.mark.parametrize("bias", [True, False])
def test_against_float64(name, bias, passes):
    program = {**SHARED, **APART}[name]
    plain, deferred = heads(bias=bias)
    hidden, targets = inputs()
    logits = deferred(hidden)
    loss = program(logits, targets)
    assert is_deferred(logits)
    actual = results(loss, hidden, deferred)
    times = 1 if name in SHARED else 2
    assert passes == ["forward"] * times + ["backward"] * times
    precise, hidden64 = plain.double(), hidden.detach().double().requires_grad_()
    wanted = program(precise(hidden64), targets)
    for mine, reference in zip(actual, results(wanted, hidden64, precise), strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**14])
def test_16_bits_as_the_plain_loss_has_them(dtype, scale):
    """Also where gradients are scaled, as for fp16: a tile holds no scale."""
    plain, deferred = heads(dtype)
    hidden, targets = inputs(dtype)
    mine = results(palm(deferred(hidden), targets) * scale, hidden, deferred)
    half = results(palm(plain(hidden), targets) * scale, hidden, plain)
    precise, hidden64 = plain.double(), hidden.detach().double().requires_grad_()
    exact = results(palm(precise(hidden64), targets) * scale, hidden64, precise)
    for one, theirs, reference in zip(mine, half, exact, strict=True):
        assert one.dtype == theirs.dtype
        bound = max(2 * far(theirs, reference), 1e-6)
        assert far(one, reference) <= bound


def far(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor.double() - reference).abs().max() / reference.abs().max())


def test_the_cross_entropy_keeps_its_bits():
    plain, deferred = heads()
    hidden, targets = inputs()
    logits = deferred(hidden)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    logits.logsumexp(-1)  # nobody's
    with torch.no_grad():
        seen = logits.logsumexp(-1)
    assert not seen.requires_grad
    expected = linear_cross_entropy(hidden, plain, targets)
    for mine, wanted in zip(
        results(loss, hidden, deferred), results(expected, hidden, plain), strict=True
    ):
        assert same_bits(mine, wanted)


def test_the_loss_is_that_of_z_loss():
    plain, deferred = heads()
    hidden, targets = inputs()
    counted = targets.flatten() != -100
    flat = deferred(hidden).flatten(0, 1)
    loss = F.cross_entropy(flat, targets.flatten())
    squared = torch.logsumexp(flat, 1).square() * counted
    loss = loss + FACTOR * squared.sum() / counted.sum()
    wanted = linear_cross_entropy(hidden, plain, targets, z_loss=FACTOR)
    for mine, other in zip(
        results(loss, hidden, deferred), results(wanted, hidden, plain), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_and_shapes_are_torchs(dtype, autocast):
    plain, deferred = heads(dtype)
    hidden, _ = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        z, real = deferred(hidden), plain(hidden)
        for look in (
            lambda x: x.logsumexp(-1),
            lambda x: x[0, 0].logsumexp(0, True),
            lambda x: x.float().chunk(2, dim=1)[1].logsumexp((2,)),
            lambda x: x[:0].logsumexp(dim=-1),
        ):
            mine, theirs = look(z), look(real)
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            # torch rounds to bf16 within, too.
            rtol = 1e-6 if mine.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=0)
    assert is_deferred(z)


def test_what_was_computed_without_gradients_is_computed_again_with_them():
    plain, deferred = heads()
    hidden, _ = inputs()
    logits = deferred(hidden)
    with torch.no_grad():
        assert not logits.logsumexp(-1).requires_grad
    mine = results(logits.logsumexp(-1).sum(), hidden, deferred)
    wanted = results(plain(hidden).logsumexp(-1).sum(), hidden, plain)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        logits = deferred(hidden)
    assert not logits.logsumexp(-1).requires_grad


def test_the_same_tokens_are_found_by_how_they_were_chosen(passes):
    _, deferred = heads()
    hidden, targets = inputs()
    logits = deferred(hidden)
    chosen: list[Callable[[Tensor], Tensor]] = [
        lambda z: z[:, 1:],
        lambda z: z[:, :-1],
        lambda z: z.flatten(0, 1)[: BATCH * (LENGTH - 1)],
        lambda z: z.chunk(2, dim=1)[0],
        lambda z: z.chunk(2, dim=1)[1],
        lambda z: z.split(2, dim=1)[0],
        lambda z: z[1:],
    ]
    for number, choose in enumerate(chosen):
        tokens = choose(logits)
        classes = choose(targets[..., None])[..., 0]
        F.cross_entropy(tokens.reshape(-1, VOCAB), classes.flatten())
        assert same_bits(
            choose(logits.float()).logsumexp(-1),
            choose(hidden_lse(deferred, hidden)[..., None])[..., 0],
        )
        assert len(passes) == 2 * (number + 1)  # a loss, and `hidden_lse`'s


def hidden_lse(head: nn.Linear, hidden: Tensor) -> Tensor:
    return head(hidden).logsumexp(-1)


# What needs the logits -> what the warning says.
LOOKS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tokens": (lambda z: z.logsumexp(1), "not along the vocabulary alone"),
    "both": (lambda z: torch.logsumexp(z, (1, 2)), "not along the vocabulary alone"),
    "out": (
        lambda z: torch.logsumexp(z.detach(), -1, out=torch.empty(0)),
        "torch.Tensor.detach",
    ),
    "softmax": (lambda z: z.log_softmax(-1), "torch.Tensor.log_softmax"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_gets_what_the_head_gives(name):
    look, says = LOOKS[name]
    plain, deferred = heads()
    hidden, _ = inputs()
    with pytest.warns(UserWarning, match="which are made now") as caught:
        seen = look(deferred(hidden))
    assert says in str(caught[0].message)
    assert same_bits(seen, look(plain(hidden)))


def test_hooks_on_what_a_forward_returned_run_in_backward():
    """Where the loss came of other views than the ones that are squared."""
    _, deferred = heads()
    hidden, targets = inputs()
    logits = deferred(hidden)
    returned = logits.flatten(0, 1)
    F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))
    seen: list[str] = []
    returned.grad_fn.register_prehook(lambda gradients: seen.append("hook"))
    returned.logsumexp(-1).sum().backward()
    assert seen == ["hook"]


def test_what_changed_since_the_call_is_refused():
    _, deferred = heads()
    hidden, _ = inputs()
    logits = deferred(hidden)
    logits.logsumexp(-1)
    with torch.no_grad():
        deferred.weight.mul_(1.0)
    with pytest.raises(RuntimeError, match="got it written to since"):
        logits.logsumexp(-1)


def test_a_tensor_as_large_as_the_logits_is_never_made():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if type(out) is Tensor and not out.is_meta:
                self.numel = max(self.numel, out.numel())
            return out

    head = nn.Linear(4, 50)
    defer_logits(head)
    hidden = torch.randn(3, 200, 4, requires_grad=True)
    with Largest() as seen:
        olmo(head(hidden), torch.zeros(3, 200).long()).backward()
    assert 600 * 4 <= seen.numel < 600 * 50


def test_nothing_is_held_after_the_last_reference():
    _, deferred = heads()
    hidden = torch.randn(4, DIM, requires_grad=True) * 1
    logits = deferred(hidden)
    lse = logits.logsumexp(-1)
    gone = [weakref.ref(each) for each in (hidden, logits)]
    gc.disable()
    try:
        lse.sum().backward()
        del hidden, logits
        assert [reference() for reference in gone] == [None] * 2
    finally:
        gc.enable()
