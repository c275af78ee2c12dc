"""``defer_logits``: what stays deferred is the loss without logits, bit by bit; what
does not is what the head gives, with a warning that says who asked."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.losses import defer_logits, linear_cross_entropy
from lowtide.losses._deferred_logits import DeferredLogits
from lowtide.losses._heads import tally_of
from support import models
from support.bits import same_bits
from support.deferred_heads import (
    BATCH,
    DIM,
    FLAT,
    LAST,
    LENGTH,
    MASK,
    MASKED,
    SETTINGS,
    TOKENS,
    VOCAB,
    heads,
    inputs,
    is_deferred,
    results,
)


@pytest.fixture(autouse=True)
def no_warnings():
    """Nothing is made but where a test expects it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_is_the_one_without_logits(name, dtype):
    plain, deferred = heads(dtype)
    hidden, targets = inputs(dtype)
    logits = deferred(hidden)
    loss = FLAT[name](logits, targets)
    assert is_deferred(logits)
    expected = linear_cross_entropy(hidden, plain, targets)
    assert loss.dtype == FLAT[name](plain(hidden), targets).dtype
    expected = expected.to(loss.dtype)
    for mine, wanted in zip(
        results(loss, hidden, deferred), results(expected, hidden, plain), strict=True
    ):
        assert same_bits(mine, wanted)


def of_each(z: Tensor, targets: Tensor, **settings: Any) -> Tensor:
    flat = z.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), reduction="none", **settings)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_each_token_make_no_logits(name, dtype):
    plain, deferred = heads(dtype)
    hidden, targets = inputs(dtype)
    logits = deferred(hidden)
    each = of_each(logits, targets, label_smoothing=0.1)
    assert is_deferred(logits) and each.shape == (BATCH * LENGTH,)
    expected = linear_cross_entropy(
        hidden, plain, targets, reduction="none", label_smoothing=0.1
    )
    actual = results(MASKED[name](each), hidden, deferred)
    by_hand = results(MASKED[name](expected.flatten()), hidden, plain)
    for mine, wanted in zip(actual, by_hand, strict=True):
        assert same_bits(mine, wanted)
    reference = MASKED[name](of_each(plain(hidden), targets, label_smoothing=0.1))
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, wanted in zip(actual, results(reference, hidden, plain), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=bound, atol=bound / 10)


def test_losses_of_each_token_beside_a_z_loss():
    """One backward of both, in a pass of the cross entropy's."""
    plain, deferred = heads()
    hidden, targets = inputs()

    def loss(head: Any) -> list[Tensor]:
        logits = head(hidden)
        each = of_each(logits, targets)
        squared = logits.logsumexp(-1).square().flatten()
        return results(MASKED["mask"](each + 0.05 * squared), hidden, head)

    for mine, wanted in zip(loss(deferred), loss(plain), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_settings_against_float64(settings, bias):
    plain, deferred = heads(bias=bias)
    hidden, targets = inputs()
    loss = F.cross_entropy(
        deferred(hidden).flatten(0, 1), targets.clamp(min=0).flatten(), **settings
    )
    precise, hidden64 = plain.double(), hidden.detach().double().requires_grad_()
    wanted = F.cross_entropy(
        precise(hidden64).flatten(0, 1), targets.clamp(min=0).flatten(), **settings
    )
    for mine, reference in zip(
        results(loss, hidden, deferred), results(wanted, hidden64, precise), strict=True
    ):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_are_chosen_without_logits(name):
    choose, shape = TOKENS[name]
    plain, deferred = heads()
    hidden, _ = inputs()
    count = int(torch.tensor(shape).prod())
    targets = torch.arange(count) % VOCAB
    chosen = choose(deferred(hidden))
    assert is_deferred(chosen) and chosen.shape == (*shape, VOCAB)
    loss = F.cross_entropy(chosen.contiguous().view(-1, VOCAB), targets)
    expected = linear_cross_entropy(choose(hidden), plain, targets.view(shape))
    for mine, wanted in zip(
        results(loss, hidden, deferred), results(expected, hidden, plain), strict=True
    ):
        assert same_bits(mine, wanted)


@pytest.mark.parametrize("look", [lambda z: z * 1, lambda z: z.sum()])
def test_an_index_that_changes_afterwards_has_chosen_what_it_said(look):
    plain, deferred = heads()
    hidden, _ = inputs()
    index = MASK.clone()
    chosen, wanted = deferred(hidden)[index], plain(hidden)[index]
    index.logical_not_()
    with pytest.warns(UserWarning, match="which are made now"):
        assert same_bits(look(chosen), look(wanted))


def flat_loss(z: Tensor, **settings: Any) -> Tensor:
    targets = inputs()[1].flatten()
    return F.cross_entropy(z.flatten(0, 1), targets, **settings)


# What needs the logits -> who the warning says has asked.
LOOKS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "argmax": (lambda z: z.float().argmax(-1), "torch.Tensor.argmax"),
    "arithmetic": (lambda z: z / 2.0, "torch.Tensor.div"),
    "second": (lambda z: torch.mul(2.0 * torch.ones(VOCAB), z), "torch.mul"),
    "classes": (lambda z: z[..., :5], "__getitem__ (of the vocabulary)"),
    "picked": (lambda z: z[..., LAST], "__getitem__ (of the vocabulary)"),
    "mask": (
        lambda z: z[torch.ones(BATCH, LENGTH, VOCAB, dtype=torch.bool)],
        "__getitem__ (of the vocabulary)",
    ),
    "behind": (lambda z: z[..., None], "__getitem__ (of the vocabulary)"),
    "list_index": (lambda z: z[[0, 2]], "__getitem__ (neither integers"),
    "narrow_of_classes": (lambda z: z.narrow(-1, 0, 5), "narrow (of the vocabulary)"),
    "class": (lambda z: z.select(2, 3), "select (of the vocabulary)"),
    "classes_split": (lambda z: z.unbind(-1)[0], "unbind (of the vocabulary)"),
    "unsqueeze": (lambda z: z.unsqueeze(-1), "unsqueeze (to shape"),
    "unflatten": (lambda z: z.unflatten(-1, (VOCAB, 1)), "unflatten (to shape"),
    "as_bytes": (lambda z: z.view(torch.int32), "view (its arguments)"),
    "double": (lambda z: z.double(), "torch.Tensor.double"),
    "narrow": (lambda z: z.to(torch.bfloat16), "to (to torch.bfloat16)"),
    "list": (lambda z: torch.cat([z, z]), "torch.cat"),
    "detach": (lambda z: z.detach(), "torch.Tensor.detach"),
    "in_place": (lambda z: z.mul_(2.0), "torch.Tensor.mul_"),
    "weights": (
        lambda z: flat_loss(z, weight=torch.linspace(0, 1, VOCAB)),
        "cross_entropy (class weights)",
    ),
    "probabilities": (
        lambda z: F.cross_entropy(z.flatten(0, 1), torch.eye(VOCAB)[: BATCH * LENGTH]),
        "(targets that are no int64 class indices)",
    ),
    "classes_second": (
        lambda z: F.cross_entropy(z.transpose(1, 2), inputs()[1]),
        "torch.Tensor.transpose (of the vocabulary)",
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_gets_what_the_head_gives(name):
    look, says = LOOKS[name]
    plain, deferred = heads()
    hidden, _ = inputs()
    logits = deferred(hidden)
    with pytest.warns(UserWarning, match="which are made now") as caught:
        seen = look(logits)
    assert len(caught) == 1
    assert says in str(caught[0].message)
    assert caught[0].filename == __file__
    expected = look(plain(hidden))
    assert type(seen) is Tensor and same_bits(seen, expected)
    assert seen.requires_grad == expected.requires_grad
    if seen.requires_grad:
        for mine, wanted in zip(
            results(seen.sum(), hidden, deferred),
            results(expected.sum(), hidden, plain),
            strict=True,
        ):
            assert same_bits(mine, wanted)


def test_logits_are_made_once_and_all_see_the_same():
    plain, deferred = heads()
    hidden, targets = inputs()
    logits = deferred(hidden)
    flat = logits.flatten(0, 1)
    with pytest.warns(UserWarning, match="mul_"):
        logits.mul_(0.5)
    assert flat.data_ptr() == logits.data_ptr()
    loss = F.cross_entropy(flat, targets.flatten())
    wanted = F.cross_entropy((plain(hidden) * 0.5).flatten(0, 1), targets.flatten())
    assert same_bits(loss, wanted)
    assert same_bits(*(torch.autograd.grad(z, hidden)[0] for z in (loss, wanted)))


def test_looks_at_one_call_multiply_and_say_so_once(monkeypatch):
    _, deferred = heads(torch.bfloat16)
    hidden, _ = inputs(torch.bfloat16)
    products: list[Tensor] = []
    linear = F.linear

    def counted(*args: Any) -> Tensor:
        products.append(linear(*args))
        return products[-1]

    monkeypatch.setattr(F, "linear", counted)
    logits = deferred(hidden)
    wide, part = logits.float().flatten(0, 1), logits[:, 1:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part.argmax(-1)
        wide.softmax(-1)
        for _ in range(2):
            logits.argmax(-1)
    assert [each.shape for each in products] == [logits.shape]
    assert len(caught) == 1
    assert tally_of(deferred).made == {"torch.Tensor.argmax": 1}


def test_a_place_is_told_once_whatever_the_step():
    _, deferred = heads()
    hidden, _ = inputs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            deferred(hidden).argmax(-1)
            deferred(hidden).argmax(-1)
            for look in (torch.sum, torch.mean):
                look(deferred(hidden))
    assert {one.filename for one in caught} == {__file__}
    first = caught[0].lineno
    said = [(one.lineno - first, str(one.message).split()[3]) for one in caught]
    assert said == [
        (0, "torch.Tensor.argmax"),
        (1, "torch.Tensor.argmax"),
        (3, "torch.sum"),
        (3, "torch.mean"),
    ]
    assert tally_of(deferred).made.total() == 12


def test_a_look_without_gradients_leaves_the_graph_to_the_loss():
    plain, deferred = heads()
    hidden, targets = inputs()
    logits = deferred(hidden)
    with torch.no_grad(), pytest.warns(UserWarning, match="argmax"):
        logits.argmax(-1)
    loss = flat_loss(logits)
    for mine, wanted in zip(
        results(loss, hidden, deferred),
        results(flat_loss(plain(hidden)), hidden, plain),
        strict=True,
    ):
        assert same_bits(mine, wanted)


@pytest.mark.parametrize("look", [False, True])
def test_hooks_on_what_a_forward_returned_run_in_backward(look):
    """As a sharded model's do, which gather for it; the plain logits have them, too."""
    _, deferred = heads(torch.bfloat16)
    hidden, targets = inputs(torch.bfloat16)
    logits = deferred(hidden)
    returned = logits.float()
    seen: list[str] = []
    logits.grad_fn.register_prehook(lambda gradients: seen.append("logits"))
    returned.grad_fn.register_prehook(lambda gradients: seen.append("float"))
    if look:
        with pytest.warns(UserWarning, match="torch.Tensor.sum"):
            returned.sum().backward()
    else:
        F.cross_entropy(returned.flatten(0, 1), targets.flatten()).backward()
    assert seen == ["float", "logits"]


def test_without_gradients():
    plain, deferred = heads()
    hidden, targets = inputs()
    with torch.no_grad():
        logits = deferred(hidden)
    assert not logits.requires_grad
    loss = flat_loss(logits)  # outside, where gradients are on
    assert not loss.requires_grad
    assert same_bits(loss, linear_cross_entropy(hidden, plain, targets).detach())
    kept = deferred(hidden)
    with torch.no_grad():
        flat = kept.flatten(0, 1)
    assert kept.requires_grad and not flat.requires_grad
    assert not F.cross_entropy(flat, targets.flatten()).requires_grad
    with torch.inference_mode():
        assert same_bits(flat_loss(deferred(hidden)), loss)


def test_frozen_trunk_and_frozen_head():
    plain, deferred = heads()
    hidden, targets = inputs()
    fixed = hidden.detach()
    loss = flat_loss(deferred(fixed))
    wanted = linear_cross_entropy(fixed, plain, targets)
    assert same_bits(
        torch.autograd.grad(loss, deferred.weight)[0],
        torch.autograd.grad(wanted, plain.weight)[0],
    )
    deferred.requires_grad_(False)
    (gradient,) = torch.autograd.grad(flat_loss(deferred(hidden)), hidden)
    loss = linear_cross_entropy(hidden, plain, targets)
    assert same_bits(gradient, torch.autograd.grad(loss, hidden)[0])
    assert not deferred(fixed).requires_grad


@pytest.mark.parametrize("look", [False, True])
def test_autocast_is_that_of_the_call(look):
    plain, deferred = heads()
    hidden, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        logits, real = deferred(hidden), plain(hidden)
        expected = linear_cross_entropy(hidden, plain, targets)
        assert flat_loss(logits).dtype == flat_loss(real).dtype == torch.float32
    assert logits.dtype == real.dtype == torch.bfloat16
    if look:
        with pytest.warns(UserWarning, match="torch.Tensor.add"):
            assert same_bits(logits + 0, real + 0)
    else:
        assert same_bits(flat_loss(logits.float()), expected)


def test_what_changed_since_the_call_is_refused():
    _, deferred = heads()
    hidden, _ = inputs()
    for change in (hidden, deferred.weight):
        logits = deferred(hidden)
        with torch.no_grad():
            change.mul_(1.0)
        with pytest.raises(RuntimeError, match="got it written to since"):
            flat_loss(logits)
    logits = deferred(hidden.to(torch.float32))
    half = heads(torch.bfloat16)[1](hidden.bfloat16())
    wide = half.float()
    with pytest.warns(UserWarning, match="mul_"):
        half.mul_(2)
    with pytest.raises(RuntimeError, match="before they are written to in place"):
        _ = wide + 1


def test_copies_of_the_head():
    _, deferred = heads()
    hidden, _ = inputs()
    for again in (copy.deepcopy(deferred), pickle.loads(pickle.dumps(deferred))):
        assert type(again).__name__ == "Linear" and repr(again) == repr(deferred)
        assert is_deferred(again(hidden))
        assert same_bits(flat_loss(again(hidden)), flat_loss(deferred(hidden)))
    defer_logits(deferred)  # a second time
    assert is_deferred(deferred(hidden))


def test_logits_can_be_copied_and_stored():
    plain, deferred = heads()
    hidden, _ = inputs()
    with torch.no_grad():
        logits = deferred(hidden)
    with pytest.warns(UserWarning, match="__deepcopy__"):
        assert same_bits(copy.deepcopy(logits), plain(hidden))
    with torch.no_grad():
        logits = deferred(hidden)
    with pytest.warns(UserWarning, match="__reduce_ex__"):
        assert same_bits(pickle.loads(pickle.dumps(logits)), plain(hidden))


def test_a_hooked_head_is_called():
    plain, deferred = heads()
    hidden, _ = inputs()
    seen: list[Tensor] = []
    handle = deferred.register_forward_hook(lambda m, args, out: seen.append(out))
    with pytest.warns(UserWarning, match="a head with hooks, which want its output"):
        logits = deferred(hidden)
    assert seen[0] is logits and same_bits(logits, plain(hidden))
    handle.remove()
    assert is_deferred(deferred(hidden))


def test_a_tied_embedding():
    def gradient(defer: bool) -> Tensor:
        torch.manual_seed(0)
        embed, head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        head.weight = embed.weight
        _, targets = inputs()
        hidden = torch.tanh(embed(targets.clamp(min=0)))
        if defer:
            defer_logits(head)
            loss = flat_loss(head(hidden))
        else:
            loss = linear_cross_entropy(hidden, head, targets)
        return torch.autograd.grad(loss, embed.weight)[0]

    assert same_bits(gradient(True), gradient(False))


def test_only_linear_layers():
    with pytest.raises(ValueError, match="expected an nn.Linear .* got Embedding"):
        defer_logits(nn.Embedding(2, 3))  # type: ignore[arg-type]


def test_a_tensor_as_large_as_the_logits_is_never_made():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not isinstance(out, DeferredLogits):
                self.numel = max(self.numel, out.numel())
            return out

    head = nn.Linear(4, 50)
    defer_logits(head)
    hidden, targets = torch.randn(600, 4, requires_grad=True), torch.zeros(600).long()
    with Largest() as seen:
        F.cross_entropy(head(hidden).float(), targets).backward()
    assert 600 * 4 <= seen.numel < 600 * 50


@pytest.mark.parametrize("tied", [False, True], ids=["llama", "qwen3_tied"])
def test_transformers_own_loss(tied):
    def run(defer: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = models.qwen3_tied() if tied else models.llama()
        if defer:
            defer_logits(model.lm_head)
        labels = models.tokens(torch.Generator().manual_seed(1))
        out = model(input_ids=labels, labels=labels)
        assert is_deferred(out.logits) == defer
        out.loss.backward()
        whole = model(input_ids=labels, labels=labels, num_items_in_batch=7).loss
        return [out.loss, whole, *(p.grad for p in model.parameters())]

    for mine, wanted in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_transformers_generates_the_same():
    model = models.llama().eval()
    ids = models.tokens(torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    defer_logits(model.lm_head)
    with pytest.warns(UserWarning, match="deferred logits: "):
        actual = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(actual, expected)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_custom_functions_of_logits_are_refused():
    """They get no numbers before they run, and autograd takes no others."""
    _, deferred = heads()
    hidden, _ = inputs()
    with pytest.warns(UserWarning, match="torch.Tensor.mul"):
        doubled = Doubled.apply(deferred(hidden))
    with pytest.raises(RuntimeError, match="got some from a custom autograd.Function"):
        flat_loss(doubled).backward()
    logits = checkpoint(deferred, hidden, use_reentrant=True)
    with pytest.raises(RuntimeError, match="got them from CheckpointFunctionBackward"):
        flat_loss(logits)


def test_inside_a_checkpoint():
    plain, deferred = heads()
    hidden, targets = inputs()
    logits = checkpoint(lambda h: deferred(h.tanh()), hidden, use_reentrant=False)
    assert is_deferred(logits)
    wanted = linear_cross_entropy(hidden.tanh(), plain, targets)
    for mine, other in zip(
        results(flat_loss(logits), hidden, deferred),
        results(wanted, hidden, plain),
        strict=True,
    ):
        assert same_bits(mine, other)


IN_GRAPH = "a graph of torch.compile that calls the head"


def test_a_compiled_model_calls_its_head():
    plain, deferred = heads()
    hidden, _ = inputs()
    for head in (deferred, copy.deepcopy(deferred)):
        compiled = torch.compile(
            nn.Sequential(nn.Tanh(), head), backend="eager", fullgraph=True
        )
        with pytest.warns(UserWarning, match=IN_GRAPH) as caught:
            seen = [compiled(hidden) for _ in range(2)]
        assert all(same_bits(one, plain(hidden.tanh())) for one in seen)
        assert [one.filename for one in caught] == [__file__]
        assert tally_of(head).made == {IN_GRAPH: 1}


def test_nothing_is_held_after_the_last_reference():
    _, deferred = heads()
    hidden = torch.randn(4, DIM, requires_grad=True) * 1
    logits = deferred(hidden)
    chosen = logits[1:]
    loss = F.cross_entropy(chosen, torch.zeros(3, dtype=torch.int64))
    gone = [weakref.ref(each) for each in (hidden, logits, chosen)]
    gc.disable()
    try:
        del hidden, logits, chosen, loss
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()
