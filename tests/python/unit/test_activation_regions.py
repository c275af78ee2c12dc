"""Checkpointed regions behave as torch's non-reentrant checkpoints: same bits, early
stop, every kind of backward."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lowtide import ActivationPolicy, checkpoint
from support.blocks import assert_same_bits, gradients, rows, stack, step
from support.regions import Call, leaf, region


def both(function, *args, **kwargs) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients with and without a region; ``function(module, *args)`` -> loss."""
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        module = Call(function)
        if wrap:
            checkpoint(module)
        for arg in args:
            if isinstance(arg, Tensor):
                arg.grad = None
        module(*args, **kwargs).backward()
        tensors = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        found.append(gradients([*tensors, module.weight]))
    return found[0], found[1]


def test_same_bits_over_three_steps():
    plain, ours = stack(dropout=0.1), stack(dropout=0.1, wrap=checkpoint)
    for seed in range(3):
        assert_same_bits(step(ours, rows(seed)), step(plain, rows(seed)))


def test_nothing_inside_a_region_is_saved():
    saved = []
    plain, ours = stack(), stack(wrap=checkpoint)
    x = rows().requires_grad_()
    for model in (plain, ours):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.nbytes) or t, lambda t: t
        ):
            model(x)
        if model is plain:
            assert sum(saved) > 0
            saved.clear()
    # Only the regions' inputs, which pass through the hooks around them.
    assert sum(saved) == 4 * x.nbytes


def flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_recomputation_stops_at_the_last_value_needed():
    plain = flops(lambda: step(stack(1)))
    ours = flops(lambda: step(stack(1, wrap=checkpoint)))
    # The second matrix product is not repeated: nothing saves what it returns.
    assert ours - plain == 2 * 8 * 16 * 24


def test_a_partial_backward_computes_only_what_it_needs():
    calls = []

    def forward(module: Call, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.sin(x * module.weight)
        calls.append("first")
        second = torch.sin(first * module.weight)
        calls.append("second")
        return first.sum(), second.sum()

    module = region(forward)
    first, second = module(leaf())
    del second  # and with it the graph behind `first`
    calls.clear()
    first.backward()
    assert calls == []


@pytest.mark.parametrize("retain", [False, True])
def test_second_backward(retain: bool):
    module = region(lambda m, x: torch.sin(x * m.weight).sum())
    x = leaf()
    loss = module(x)
    loss.backward(retain_graph=retain)
    once = gradients([x, module.weight])
    x.grad = module.weight.grad = None
    if retain:
        loss.backward()
        assert_same_bits(gradients([x, module.weight]), once)
        x.grad = None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autograd_grad_leaves_other_gradients_alone():
    plain, ours = stack(), stack(wrap=checkpoint)
    x = rows().requires_grad_()
    expected = torch.autograd.grad((plain(x) ** 2).sum(), [plain[1].up.weight])
    got = torch.autograd.grad((ours(x) ** 2).sum(), [ours[1].up.weight])
    assert_same_bits(list(got), list(expected))
    assert all(p.grad is None for p in ours.parameters()) and x.grad is None


def test_backward_with_inputs():
    plain, ours = stack(), stack(wrap=checkpoint)
    for model in (plain, ours):
        (model(rows()) ** 2).sum().backward(inputs=[model[2].down.weight])
    assert torch.equal(ours[2].down.weight.grad, plain[2].down.weight.grad)
    assert sum(p.grad is not None for p in ours.parameters()) == 1


def test_forward_without_backward_holds_no_module_alive():
    model = stack(wrap=checkpoint)
    out = model(rows().requires_grad_())
    weak = weakref.ref(model[0])
    del model
    gc.collect()
    assert weak() is not None  # backward could still come
    del out
    gc.collect()
    assert weak() is None


def test_without_grad_mode_nothing_is_recorded():
    model = stack(wrap=checkpoint)
    with torch.no_grad():
        assert not model(rows()).requires_grad
    with torch.inference_mode():
        assert model(rows()).is_inference()


def test_arguments_of_all_kinds():
    def forward(m, pair, *, scale, table, mask=None, nothing=None, flag=True):
        a, b = pair
        y = a * m.weight + b.sin() * scale
        if flag and nothing is None:
            y = y + table["w"] * table["n"][0]
        return y.masked_fill(mask, 0.0).exp().sum()

    a, b, w = leaf(), leaf(0.1, 0.2, 0.3, 0.4), leaf(3.0, 1.0, 1.0, 2.0)
    found = []
    for wrap in (False, True):
        module = Call(forward)
        if wrap:
            checkpoint(module)
        for t in (a, b, w):
            t.grad = None
        mask = torch.tensor([True, False, False, True])
        module((a, b), scale=2.0, table={"w": w, "n": [3]}, mask=mask).backward()
        found.append(gradients([a, b, w, module.weight]))
    assert_same_bits(found[1], found[0])


def test_registered_containers_are_walked():
    from collections import namedtuple

    Pair = namedtuple("Pair", "x y")
    assert_same_bits(
        *both(
            lambda m, x, y: (
                Call.__call__(m, x, y)
                if False
                else (Pair(x, y).x * m.weight).sin().sum() + Pair(x, y).y.sum()
            ),
            leaf(),
            leaf(),
        )
    )
    module = region(lambda m, p: (p.x * m.weight).sin().sum() + p.y.sum())
    x, y = leaf(), leaf()
    weak = weakref.ref(x.untyped_storage())
    loss = module(Pair(x, y))
    loss.backward()
    assert torch.equal(y.grad, torch.ones(4)) and weak is not None


def test_several_outputs_and_views():
    def forward(m, x):
        y = (x * m.weight).sin()
        return y[:2], y.view(2, 2), 7, None

    found = []
    for wrap in (False, True):
        module = Call(forward)
        if wrap:
            checkpoint(module)
        x = leaf()
        a, b, seven, none = module(x)
        assert (seven, none) == (7, None)
        (a.exp().sum() + b.cos().sum()).backward()
        found.append(gradients([x, module.weight]))
    assert_same_bits(found[1], found[0])


def test_inputs_without_gradient():
    module = region(lambda m, x: (x * m.weight).sin().sum())
    x = torch.ones(4)
    module(x).backward()
    assert torch.equal(module.weight.grad, torch.full((4,), 0.5).cos())


def test_views_of_one_tensor_as_arguments():
    def forward(m, a, b):
        return (a * m.weight).sin().sum() + (b * b).sum()

    base = torch.arange(8.0, requires_grad=True)
    found = []
    for wrap in (False, True):
        module = Call(forward)
        if wrap:
            checkpoint(module)
        base.grad = None
        doubled = base * 2
        module(doubled[:4], doubled[2:6]).backward()
        found.append(gradients([base, module.weight]))
    assert_same_bits(found[1], found[0])


def test_gradients_inside_the_forward():
    def forward(m, x):
        y = (x * m.weight).sin()
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return (y * g.detach()).sum()

    assert_same_bits(*reversed(both(forward, leaf())))


def test_ops_that_save_their_output_and_write_in_place():
    def forward(m, x):
        y = (x * m.weight).exp()
        z = y.clone().relu_()
        return (z * F.softmax(y, 0)).tanh_().sum()

    assert_same_bits(*reversed(both(forward, leaf())))


def test_unpacking_outside_backward():
    module = region(lambda m, x: (x * m.weight).sin())
    y = module(leaf())
    assert torch.equal(y.grad_fn._saved_self, torch.tensor([0.5, 1.0, 1.5, 2.0]))
    y.sum().backward()


def test_a_function_that_reads_its_saved_tensors_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            (first,) = ctx.saved_tensors
            (second,) = ctx.saved_tensors
            assert torch.equal(first, second)
            return grad * second.cos()

    x = leaf()
    region(lambda m, x: Twice.apply(x * m.weight).sum())(x).backward()
    assert torch.equal(x.grad, 0.5 * (x * 0.5).detach().cos())


def test_two_threads_run_backward_at_once():
    model = stack(wrap=checkpoint)
    expected = step(stack())
    x = rows().requires_grad_()
    losses = [(model(x * 1.0) ** 2).sum() for _ in range(4)]
    results: list[list[Tensor]] = []

    def run(loss: Tensor) -> None:
        results.append(list(torch.autograd.grad(loss, [x, *model.parameters()])))

    threads = [threading.Thread(target=run, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    for result in results:
        assert_same_bits(result, expected[1:])


class Bomb(Exception):
    pass


@pytest.mark.parametrize("when", ["forward", "recomputation"])
def test_after_an_exception_training_goes_on(when: str):
    fuse = {"calls": 0, "at": 1 if when == "forward" else 2}

    def forward(m, x):
        fuse["calls"] += 1
        y = (x * m.weight).sin()
        if fuse["calls"] == fuse["at"]:
            raise Bomb
        return y.exp().sum()

    module = region(forward)
    x = leaf()
    with pytest.raises(Bomb):
        module(x).backward()
    x.grad = module.weight.grad = None
    module(x).backward()
    expected = both(lambda m, x: (x * m.weight).sin().exp().sum(), leaf())[0]
    assert_same_bits(gradients([x, module.weight]), expected)


def test_an_exception_in_backward_frees_what_was_computed_again():
    refs = []

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Bomb

    def forward(m, x):
        y = Fail.apply(x * m.weight)
        z = y.exp()
        refs.append(weakref.ref(z.untyped_storage()))
        return (z.sin() * z.cos()).sum()

    module = region(forward)
    loss = module(leaf())
    with pytest.raises(Bomb):
        loss.backward(retain_graph=True)
    gc.collect()
    assert len(refs) == 2 and refs[1]() is None


def test_a_handler_for_exceptions_in_the_forward_does_not_see_the_early_stop():
    seen = []

    def forward(m, x):
        try:
            return (x * m.weight).sin().sum()
        except Exception as error:
            seen.append(error)
            raise

    region(forward)(leaf()).backward()
    assert seen == []


def test_deepcopy_and_pickle_keep_the_policy():
    model = stack(2, wrap=lambda m: checkpoint(m, ActivationPolicy(offload=["hidden"])))
    expected = step(stack(2))
    assert_same_bits(step(copy.deepcopy(model)), expected)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert list(model.state_dict()) == list(stack(2).state_dict())
