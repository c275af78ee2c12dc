"""What a recomputation leaves out: only calls that would do what those of the first
forward did, and gradients are exact whatever else it meets."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lowtide import _C, ActivationPolicy, checkpoint, tag
from lowtide._activation.interior import NOT_REPEATED
from lowtide._activation.regions import region_state

WIDTH = 8


def policy(**listed: list[str]) -> ActivationPolicy:
    return ActivationPolicy(min_bytes=0, **listed)


class Block(nn.Module):
    """Two products, ``a`` and ``b``, in what ``forward`` makes of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.form = forward
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def block(forward: Callable[[Any, Tensor], Tensor]) -> Block:
    torch.manual_seed(1)
    return Block(forward)


def gradients(model: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    y = run(model, x * 1.5)
    (y * torch.linspace(0, 1, y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def call(model: Any, x: Tensor) -> Tensor:
    return model(x)


def assert_exact(
    make: Callable[[], nn.Module],
    wrap: Callable[[Any], object],
    run: Callable[[Any, Tensor], Tensor] = call,
) -> nn.Module:
    plain = make()
    ours = copy.deepcopy(plain)
    wrap(ours)
    expected, got = gradients(plain, run), gradients(ours, run)
    assert len(expected) == len(got)
    for ours_of, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours_of, theirs)
    return ours


def skipped(module: nn.Module, name: str) -> dict[str, int]:
    return region_state(module).region.figures()[name]["skipped"]


TREATMENTS = ("save", "offload")


# -- calls of the second forward ------------------------------------------------------


def with_cache(self: Block, x: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = torch.arange(8.0) * 0.1
    h = tag(self.a(x) * x, "hidden")
    return torch.sin(h) * self.cache


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_cache_filled_in_the_first_forward_shifts_nothing(treatment: str) -> None:
    wrap = lambda m: checkpoint(m, policy(**{treatment: ["hidden"]}))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(lambda: block(with_cache), wrap)


def behind_a_cache(self: Block, x: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = torch.arange(8.0) * 0.1
    h = tag(self.a(x * self.cache) * x, "hidden")
    return torch.sin(h)


def test_a_value_made_in_another_way_is_computed_again_and_said_so() -> None:
    with pytest.warns(UserWarning, match="checkpoint.Block.: expected the second for"):
        ours = assert_exact(
            lambda: block(behind_a_cache),
            lambda m: checkpoint(m, policy(save=["hidden"])),
        )
    assert skipped(ours, "hidden") == {NOT_REPEATED: 1}
    # From the second call on the forward is a function of its arguments.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(ours, call)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_casts_that_autocast_has_in_its_cache(treatment: str) -> None:
    def cast(self: Block, x: Tensor) -> Tensor:
        h = tag(self.a(x).float().bfloat16(), "hidden")
        return self.b(torch.sin(h)).float()

    def twice(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(model(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(
            lambda: block(cast),
            lambda m: checkpoint(m, policy(**{treatment: ["hidden"]})),
            twice,
        )


def test_equal_calls_are_told_apart_by_their_order() -> None:
    def twice_the_same(self: Block, x: Tensor) -> Tensor:
        first = tag(F.dropout(x, 0.5), "first")
        second = F.dropout(x, 0.5)
        third = tag(F.dropout(x, 0.5), "third")
        return self.a(first).sin() * self.b(second).sin() * third.sin()

    def seeded(model: Any, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return model(x)

    assert_exact(
        lambda: block(twice_the_same),
        lambda m: checkpoint(m, policy(save=["first"], offload=["third"])),
        seeded,
    )


def one_product_more(self: Block, x: Tensor) -> Tensor:
    if self.cache is None:
        with torch.no_grad():
            self.cache = self.b(x)
    return torch.sin(tag(self.a(x), "hidden")) * torch.sin(self.b(x)) * self.cache


def one_sum_more(self: Block, x: Tensor) -> Tensor:
    if self.cache is None:
        with torch.no_grad():
            self.cache = x + self.b.bias
    hidden = tag(x + self.a.bias, "hidden")
    return torch.sin(hidden) * torch.sin(x + self.b.bias) * self.cache


RISING, FALLING = torch.arange(8.0), torch.arange(8.0).flip(0)


def one_scaling_more(self: Block, x: Tensor) -> Tensor:
    if self.cache is None:
        with torch.no_grad():
            self.cache = x * FALLING
    return torch.sin(tag(x * RISING, "hidden")) * torch.sin(x * FALLING) * self.cache


def one_softmax_more(self: Block, x: Tensor) -> Tensor:
    x = x @ x.t()  # a square
    if self.cache is None:
        with torch.no_grad():
            self.cache = x.softmax(-2)
    hidden = tag(x.softmax(-1), "hidden")
    return torch.sin(hidden) * torch.sin(x.softmax(-2)) * self.cache


@pytest.mark.parametrize(
    "form", [one_product_more, one_sum_more, one_scaling_more, one_softmax_more]
)
def test_a_call_of_the_first_forward_alone_shifts_no_other(form: Any) -> None:
    """Its like differ from it in a parameter, in a tensor of the same geometry that no
    call made, or in a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = assert_exact(
            lambda: block(form), lambda m: checkpoint(m, policy(save=["hidden"]))
        )
    assert skipped(ours, "hidden") == {}


def test_what_tells_calls_apart() -> None:
    lineage, x = _C.Lineage([]), torch.zeros(2, 2)
    generators = [torch.Generator(), torch.Generator()]
    arguments: list[Any] = [
        *(-2, -1, 0, 1, 0.0, -1.0, -2.0, [1], [[1]], [1, 2], [[1], 2], None, "mean"),
        *(torch.float32, torch.bfloat16, torch.strided, torch.device("cpu")),
        *(torch.contiguous_format, x, x[:1], x[1:], x.t()[:1], 1j, *generators),
    ]
    keys = [lineage.key_of(torch.ops.aten.sum, (x, each), {}) for each in arguments]
    keys += [lineage.key_of(torch.ops.aten.sum, (x,), {"dim": each}) for each in (0, 1)]
    keys += [lineage.key_of(torch.ops.aten.mean, (x, 0), {})]
    assert len(set(keys)) == len(keys)
    again = [lineage.key_of(torch.ops.aten.sum, (x, each), {}) for each in arguments]
    assert again == keys[: len(again)]
    nan = (lineage.key_of(torch.ops.aten.sum, (x, float("nan")), {}) for _ in "ab")
    assert len(set(nan)) == 1


def test_gradients_taken_in_the_forward_shift_no_call() -> None:
    def forces(self: Block, x: Tensor) -> Tensor:
        energy = torch.sin(self.b(x)).sum()
        (force,) = torch.autograd.grad(energy, x)
        hidden = tag(self.a(x), "hidden")
        return torch.sin(hidden) * torch.sin(self.b(x)) * force

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = assert_exact(
            lambda: block(forces), lambda m: checkpoint(m, policy(save=["hidden"]))
        )
    assert skipped(ours, "hidden") == {}


def test_a_parameter_among_the_arguments() -> None:
    class WithBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.bias = nn.Parameter(torch.randn(WIDTH))
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.inner.forward = self.attend  # type: ignore[method-assign]

        def attend(self, x: Tensor, bias: Tensor) -> Tensor:
            h = tag(F.linear(x + bias, self.inner.weight), "hidden")
            return torch.sin(h)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.bias)

    def wrap(model: Any) -> None:
        model.inner.forward = model.attend
        checkpoint(model.inner, policy(save=["hidden"]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = assert_exact(WithBias, wrap)
    assert skipped(ours.inner, "hidden") == {}  # type: ignore[arg-type]


def test_a_generator_of_its_own_goes_on_behind_a_skipped_call() -> None:
    generator = torch.Generator()

    def masks(self: Block, x: Tensor) -> Tensor:
        generator.manual_seed(5)
        half = torch.full_like(x, 0.5)
        first = tag(torch.bernoulli(half, generator=generator), "mask")
        second = torch.bernoulli(half, generator=generator)
        return torch.sin(self.a(x) * first) * second

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = assert_exact(
            lambda: block(masks), lambda m: checkpoint(m, policy(save=["mask"]))
        )
    assert skipped(ours, "mask") == {}


@pytest.mark.parametrize("layout", ["coo", "csr", "jagged"])
def test_values_without_strides_pass_through(layout: str) -> None:
    offsets = torch.tensor([0, 1, 4])  # of its own sizes, each time it is made

    def forward(self: Block, x: Tensor) -> Tensor:
        hidden = tag(self.a(x), "hidden")
        if layout == "jagged":
            rows = torch.nested.nested_tensor_from_jagged(hidden, offsets)
            return self.b(torch.sin(rows)).values()
        weight = (self.b.weight * (self.b.weight > 0)).detach()
        sparse = weight.to_sparse() if layout == "coo" else weight.to_sparse_csr()
        return torch.sin(hidden) * (sparse @ x.detach().t()).t()

    assert_exact(
        lambda: block(forward), lambda m: checkpoint(m, policy(save=["hidden"]))
    )


def test_writes_in_place_before_a_named_value() -> None:
    def writes(self: Block, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(x)
        y[1:].mul_(3)
        h = tag(self.a(y), "hidden")
        return self.b(torch.sin(h))

    everything, without = (
        assert_exact(lambda: block(writes), lambda m, p=p: checkpoint(m, p))
        for p in (policy(), policy(save=["hidden"]))
    )

    def flops(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            gradients(model, call)
        return counter.get_total_flops()

    assert flops(everything) - flops(without) == 2 * 4 * WIDTH * WIDTH


# -- what an operator returned --------------------------------------------------------


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("last", [torch.tanh, torch.sigmoid, torch.relu])
def test_an_operator_that_saves_its_own_result_comes_last(treatment, last) -> None:
    def tail(self: Block, x: Tensor) -> Tensor:
        return tag(last(self.a(x)), "out")

    def twice(model: Any, x: Tensor) -> Tensor:
        return model(model(x))

    ours = assert_exact(
        lambda: block(tail),
        lambda m: checkpoint(m, policy(**{treatment: ["out"]})),
        twice,
    )
    assert skipped(ours, "out") == {}


def test_a_value_beside_a_larger_one_is_refused() -> None:
    def router(self: Block, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.a(x).bfloat16().softmax(-1), 4)
        tag(weights, "router")
        spread = torch.zeros_like(x).scatter(-1, chosen, (weights * weights).float())
        return self.b(spread * x)

    wrap = lambda m: checkpoint(m, policy(save=["router", "a"]))  # noqa: E731
    plain, ours = block(router), block(router)
    wrap(ours)
    with pytest.raises(ValueError, match=r"aten\.topk\.default returns a larger value"):
        gradients(ours, call)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert p.grad is None
        p.grad = None if q.grad is None else q.grad.clone()
    got = [p.grad for p in plain.parameters()]
    plain.zero_grad()
    gradients(plain, call)
    for p, theirs in zip(plain.parameters(), got, strict=True):
        assert torch.equal(p.grad, theirs)


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("named", ["real", "complex", "both"])
def test_views_of_another_dtype(treatment: str, named: str) -> None:
    def rope(self: Block, x: Tensor) -> Tensor:
        q = self.a(x)
        paired = torch.view_as_complex(q.view(*q.shape[:-1], -1, 2))
        if named in ("complex", "both"):
            tag(paired, "pairs")
        angles = torch.polar(torch.ones(4), torch.arange(4.0))
        turned = torch.view_as_real(paired * angles).flatten(-2)
        if named in ("real", "both"):
            tag(turned, "turned")
        return self.b(torch.sin(turned))

    names = {"real": ["turned"], "complex": ["pairs"], "both": ["turned", "pairs"]}
    assert_exact(
        lambda: block(rope),
        lambda m: checkpoint(m, policy(**{treatment: names[named]})),
    )


# -- regions in regions ---------------------------------------------------------------


class PostNorm(nn.Module):
    """Its first submodule takes what the region around it was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = Block(lambda m, x: m.b(torch.sigmoid(tag(m.a(x), "h"))))
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tag(x, "argument")
        x = self.norm(x + self.inner(x))
        return x + F.gelu(self.up(x))


INNER = [
    {},
    {"save": ["input"]},
    {"offload": ["input"]},
    {"save": ["h"]},
    {"offload": ["h", "input"]},
    {"save": ["argument"]},
    {"offload": ["argument"]},
]


@pytest.mark.parametrize("outer", [{}, {"offload": ["input"]}, {"save": ["input"]}])
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_region_that_takes_its_outer_regions_argument(inner, outer) -> None:
    def wrap(model: Any) -> None:
        for post in model:
            checkpoint(post.inner, policy(**inner))
            checkpoint(post, policy(**outer))

    assert_exact(lambda: nn.Sequential(PostNorm(), PostNorm()), wrap)


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_region_inside_torchs_checkpoint(inner) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([PostNorm(), PostNorm()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch_checkpoint(layer, x, use_reentrant=False)
            return x

    def wrap(model: Any) -> None:
        for layer in model.layers:
            checkpoint(layer.inner, policy(**inner))

    assert_exact(Around, wrap)


# -- what users do around regions -----------------------------------------------------


class OwnCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, gradient)[0]


def test_a_function_whose_backward_switches_grad_mode_on() -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        return self.b(OwnCheckpoint.apply(self.a(x)))

    ours = assert_exact(lambda: block(forward), lambda m: checkpoint(m, policy()))
    x = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="expected create_graph=False"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


def test_modules_made_of_a_checkpointed_ones_class() -> None:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    checkpoint(layers, policy())
    x = torch.randn(4, WIDTH)
    first = layers[:1]
    assert torch.equal(first(x), layers[0](x))
    first.compile(backend="eager")
    assert torch.equal(first(x), layers[0](x))
    assert region_state(first) is None


def test_a_batch_without_rows() -> None:
    model = block(lambda m, x: m.b(torch.sin(m.a(x))))
    checkpoint(model, policy(offload=["input"]))
    x = torch.randn(0, WIDTH, requires_grad=True)
    model(x * 1).sum().backward()
    assert skipped(model, "input") == {"an empty tensor": 1}
    x = torch.randn(4, WIDTH, requires_grad=True)
    model(x * 1).sum().backward()
    assert region_state(model).region.figures()["input"]["moved"] == 1
