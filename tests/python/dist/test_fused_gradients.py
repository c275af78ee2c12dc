"""``grads="fused"``: fp32 bits of the exact mode, bf16 errors below its, the same after
failures, and what is not fused says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._state import embedding
from support.bits import same_bits
from support.recorder import Record, Recorder, assert_same_records, finish_step

DIM, HIDDEN = 6, 256
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A weight that is one slice with two ranks, one whose rows lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)
        self.odd = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.odd(x)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 8)
        self.run_block: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x)


def model_of(grads: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Model()
    for block in model.blocks:
        lowtide.fully_shard(block, grads=grads, **settings)
    lowtide.fully_shard(model, grads=grads, **settings)
    return model


def data(seed: int, *, grad: bool = False, rows: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(2, rows, DIM, generator=generator, requires_grad=grad)


def uses(model: nn.Module) -> int:
    """Products that were added in place."""
    from lowtide._state.unit import unit_state

    states = {unit_state(module) for module in model.modules()} - {None}
    return sum(use.added for state in states for use in state.unit.fused_uses)


# -- the exact mode's bits -------------------------------------------------------------

Pattern = Callable[[Any, Recorder], None]
STEPS = 2


def steps(model: Any, record: Recorder, backward: Callable[[int], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        backward(step)
        finish_step(model, optimizer, record)


def plain(model: Any, record: Recorder) -> None:
    steps(model, record, lambda s: model(data(s)).pow(2).sum().backward())


def every_microbatch_reduces(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        for micro in range(3):
            model(data(3 * step + micro)).pow(2).sum().backward()

    steps(model, record, backward)


def only_the_last_reduces(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model(data(3 * step + micro)).pow(2).sum().backward()

    steps(model, record, backward)


def forwards_first(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        losses = [model(data(2 * step + micro)).pow(2).sum() for micro in range(2)]
        for loss in losses:
            loss.backward()

    steps(model, record, backward)


def retain_graph(model: Any, record: Recorder) -> None:
    def backward(step: int) -> None:
        loss = model(data(step)).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for block in model.blocks:
        block.set_reshard_after_backward(False)
    steps(model, record, backward)


def recomputed(model: Any, record: Recorder) -> None:
    model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=False)
    plain(model, record)


def recomputed_within(model: Any, record: Recorder) -> None:
    for block in model.blocks:
        lowtide.checkpoint(block, lowtide.ActivationPolicy())
    plain(model, record)


def recomputed_reentrant(model: Any, record: Recorder) -> None:
    model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=True)
    steps(model, record, lambda s: model(data(s, grad=True)).pow(2).sum().backward())


def frozen_weights(model: Any, record: Recorder) -> None:
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].odd.weight.requires_grad_(False)
    plain(model, record)


def input_gradients_only(model: Any, record: Recorder) -> None:
    x = data(0, grad=True)
    model(x).pow(2).sum().backward(inputs=[x])
    record.add("input", x.grad)
    assert all(p.grad is None for p in model.parameters())
    plain(model, record)


def input_gradients_by_grad(model: Any, record: Recorder) -> None:
    x = data(0, grad=True)
    (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), [x])
    record.add("input", gradient)
    assert all(p.grad is None for p in model.parameters())
    plain(model, record)


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (
        plain,
        every_microbatch_reduces,
        only_the_last_reduces,
        forwards_first,
        retain_graph,
        recomputed,
        recomputed_within,
        recomputed_reentrant,
        frozen_weights,
        input_gradients_only,
        input_gradients_by_grad,
    )
}


def recorded(grads: str, name: str) -> tuple[Record, int]:
    record = Recorder()
    model = model_of(grads)
    PATTERNS[name](model, record)
    return record.values, uses(model)


@pytest.mark.parametrize("name", PATTERNS)
def test_has_the_exact_modes_bits(pool_of, world_size, name):
    exact = pool_of(world_size).run(recorded, "exact", name)
    fused = pool_of(world_size).run(recorded, "fused", name)
    for (expected, none), (actual, some) in zip(exact, fused, strict=True):
        assert_same_records(actual, expected)
        assert none == 0
        assert some >= STEPS * 5


# -- errors of bf16 --------------------------------------------------------------------


def errors_of(grads: str, rows: int, micros: int) -> dict[str, float]:
    """Of every weight's gradient: its distance from the fp64 sum of the products of
    the same bf16 factors."""
    model = model_of(grads, mp_policy=BF16)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    exact: dict[str, torch.Tensor] = {}
    inputs: dict[str, torch.Tensor] = {}

    def on_output(name: str) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            x = inputs[name].double().flatten(0, -2)
            product = gradient.double().flatten(0, -2).t() @ x
            exact[name] = exact.get(name, 0) + product

        return add

    def on_forward(name: str) -> Callable[..., None]:
        def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            inputs[name] = args[0].detach().clone()
            output.register_hook(on_output(name))

        return watch

    for name, linear in linears.items():
        linear.register_forward_hook(on_forward(name))
    for micro in range(micros):
        model.set_requires_gradient_sync(micro == micros - 1)
        model(data(micro, rows=rows)).pow(2).sum().backward()
    found = {}
    for name, linear in linears.items():
        gradient = linear.weight.grad.full_tensor().double()
        found[name] = float((gradient - exact[name]).norm() / exact[name].norm())
    return found


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("micros", [1, 4])
def test_error_against_fp64_is_below_the_exact_modes(pool_of, rows, micros):
    (exact,) = pool_of(1).run(errors_of, "exact", rows, micros)
    (fused,) = pool_of(1).run(errors_of, "fused", rows, micros)
    for name, error in fused.items():
        assert error <= exact[name], name
        assert error < 1e-6, name
        assert exact[name] > 1e-4, name


# -- what is asked for, and hooks ------------------------------------------------------


def grad_of_a_weight() -> tuple[torch.Tensor, torch.Tensor, int, dict[str, str]]:
    found = []
    for grads in ("exact", "fused"):
        model = model_of(grads)
        weight = []
        pre = model.blocks[0].up.register_forward_hook(
            lambda m, a, o, w=weight: w.append(m.weight)
        )
        loss = model(data(0)).pow(2).sum()
        found.append(torch.autograd.grad(loss, weight)[0])
        pre.remove()
    report = lowtide.memory_report(model).fused
    return found[0], found[1], uses(model), report.exact


def test_gradient_that_is_asked_for_is_returned(pool_of):
    ((exact, fused, added, why),) = pool_of(1).run(grad_of_a_weight)
    assert same_bits(fused, exact)
    assert added == 0
    assert why == {
        "blocks.0.up.weight": "asked for by torch.autograd.grad (1 use)",
    }


def create_graph() -> str:
    model = model_of("fused")
    try:
        model(data(0)).pow(2).sum().backward(create_graph=True)
    except RuntimeError as error:
        lowtide.abort_step(model)
        return str(error)
    return ""


def test_create_graph_is_refused_by_name(pool_of):
    (message,) = pool_of(1).run(create_graph)
    assert "expected create_graph=False for parameters sharded by lowtide" in message


def with_hook(grads: str) -> tuple[Record, list[int], dict[str, str]]:
    model, record, seen = model_of(grads), Recorder(), []

    def hook_once(module: nn.Module, args: Any) -> None:
        if not seen:
            seen.append(0)
            module.weight.register_hook(lambda g: seen.append(g.numel()) or 2 * g)

    model.blocks[0].up.register_forward_pre_hook(hook_once)
    plain(model, record)
    report = lowtide.memory_report(model).fused
    return record.values, seen, report.exact if report else {}


def test_hooks_on_the_weight_see_its_gradient(pool_of):
    for world_size in (1, 2):
        exact = pool_of(world_size).run(with_hook, "exact")
        fused = pool_of(world_size).run(with_hook, "fused")
        for (expected, _, _), (actual, seen, why) in zip(exact, fused, strict=True):
            assert_same_records(actual, expected)
            assert seen == [0] + [DIM * HIDDEN] * STEPS
            assert why == {
                "blocks.0.up.weight": "hooks on the parameter or its gradient (2 uses)"
            }


# -- after failures --------------------------------------------------------------------


class Boom(RuntimeError):
    pass


def trained_through(failing: tuple[int, ...]) -> Record:
    """Steps 0 to 2, those in `failing` raise in backward, after some products."""
    model, record = model_of("fused"), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def boom(gradient: torch.Tensor) -> None:
        raise Boom

    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = data(2 * step + micro, grad=True)
            if step in failing and micro == 1:
                x.register_hook(boom)
            loss = model(x).pow(2).sum()
            try:
                loss.backward()
            except Boom:
                continue
        if step in failing:
            lowtide.abort_step(model)
            optimizer.zero_grad()
            continue
        finish_step(model, optimizer, record)
    return record.values


def without_step_one() -> Record:
    model, record = model_of("fused"), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in (0, 2):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(data(2 * step + micro, grad=True)).pow(2).sum().backward()
        finish_step(model, optimizer, record)
    return record.values


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_step_is_skipped(pool_of, ranks):
    failed = pool_of(ranks).run(trained_through, (1,))
    skipped = pool_of(ranks).run(without_step_one)
    for actual, expected in zip(failed, skipped, strict=True):
        assert_same_records(actual, expected)


# -- eligibility -----------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight * 2, self.bias)


class NoForward(nn.Linear):
    pass


def reasons() -> tuple[tuple[str, ...], dict[str, str], list[str], str]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(DIM, DIM),
        OwnForward(DIM, DIM),
        NoForward(DIM, DIM),
        nn.Linear(DIM, DIM),
        nn.Linear(DIM, DIM),
        nn.Linear(DIM, DIM),
    )
    model[3].weight = model[0].weight
    model[4].weight.requires_grad_(False)
    lowtide.fully_shard(model, grads="fused")
    classes = [type(module).__name__ for module in model]
    x = data(0)
    model(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).sum().backward()
    report = lowtide.memory_report(model)
    return report.fused.fused, report.fused.exact, classes, str(report)


def test_report_says_what_is_fused_and_what_is_not(pool_of):
    ((fused, exact, classes, text),) = pool_of(1).run(reasons)
    assert fused == ("2.weight", "5.weight")
    assert exact == {
        "0.weight": "several modules share it",
        "1.weight": "its layer has its own forward",
        "4.weight": "frozen",
        "2.weight": "autocast (1 use)",
        "5.weight": "autocast (1 use)",
    }
    assert classes == ["Linear", "OwnForward", "NoForward", *["Linear"] * 3]
    assert "weight gradients: 2 fused, 3 exact" in text
    assert "  1.weight: its layer has its own forward" in text


def reduced_in_bf16() -> dict[str, str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = nn.Sequential(nn.Linear(DIM, DIM))
    lowtide.fully_shard(model, mp_policy=policy, grads="fused")
    return lowtide.memory_report(model).fused.exact


def test_bf16_sums_stay_exact(pool_of):
    (exact,) = pool_of(1).run(reduced_in_bf16)
    assert exact == {
        "Linear.weight": "torch.bfloat16 products, summed in torch.bfloat16"
    }


def used_twice() -> tuple[Record, Record, dict[str, str]]:
    records = []
    for grads in ("exact", "fused"):
        model, record = model_of(grads), Recorder()
        model.blocks[0].odd.weight  # noqa: B018
        model.run_block = lambda block, x: block(block(x))
        plain(model, record)
        records.append(record.values)
    return records[0], records[1], lowtide.memory_report(model).fused.exact


def test_second_use_in_a_backward_is_autograds(pool_of):
    ((exact, fused, why),) = pool_of(1).run(used_twice)
    assert_same_records(fused, exact)
    assert why["blocks.0.odd.weight"] == "used more than once in a backward (2 uses)"


def refused() -> str:
    try:
        lowtide.fully_shard(nn.Linear(2, 2), grads="fast")  # type: ignore[call-overload]
    except ValueError as error:
        return str(error)
    return ""


def test_other_modes_are_refused(pool_of):
    (message,) = pool_of(1).run(refused)
    assert message == (
        "lowtide: fully_shard: expected grads to be 'exact' or 'fused', got 'fast'. "
        "Leave it out for FSDP2's gradients."
    )


def differing() -> str:
    grads = "fused" if dist.get_rank() == 0 else "exact"
    model: Any = nn.Sequential(nn.Linear(DIM, DIM))
    lowtide.fully_shard(model, grads=grads)
    try:
        model(data(0))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_differ_hear_about_it(pool_of):
    for message in pool_of(2).run(differing):
        assert "expected the same units and parameters in the same order" in message
        assert "fused gradient" in message


def wrapped() -> tuple[str, ...]:
    torch.manual_seed(0)
    model = lowtide.wrap(Model(), grads="fused")
    model(data(0)).sum().backward()
    return lowtide.memory_report(model).fused.fused


def test_wrap_passes_it_to_every_unit(pool_of):
    (fused,) = pool_of(1).run(wrapped)
    blocks = [
        f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down", "odd")
    ]
    assert sorted(fused) == sorted([*blocks, "head.weight"])


# -- layers that write main_grad -------------------------------------------------------


class _MainGradLinear(torch.autograd.Function):
    """What Megatron's and TransformerEngine's fused layers do with `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x, weight = ctx.saved_tensors
        weight.main_grad = ctx.main_grad
        product = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        assert weight.main_grad.dtype == torch.float32
        weight.main_grad.add_(product)
        dummy = None
        if hasattr(weight, "grad_added_to_main_grad"):
            zeros = getattr(weight, "zero_out_wgrad", False)
            fill = 0.0 if zeros else float("nan")
            dummy = torch.full_like(weight, fill)
            weight.grad_added_to_main_grad = True
        return gradient @ weight, dummy


class MainGradLinear(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.gradient_accumulation_fusion = True
        self.weight = nn.Parameter(torch.randn(HIDDEN, DIM) / 8)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.weight, "main_grad"):  # the exact mode's
            y = F.linear(x, self.weight)
        else:
            self.weight.zero_out_wgrad = self.shared
            y = _MainGradLinear.apply(x, self.weight)
        return y + self.weight.sum() if self.shared else y


def main_grads(grads: str, shared: bool) -> tuple[Record, tuple[str, ...]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(MainGradLinear(shared), nn.Linear(HIDDEN, DIM))
    lowtide.fully_shard(model[0], grads=grads)
    lowtide.fully_shard(model, grads=grads)
    record = Recorder()
    only_the_last_reduces(model, record)
    if not shared:
        every_microbatch_reduces(model, record)
    report = lowtide.memory_report(model).fused
    return record.values, report.fused if report else ()


@pytest.mark.parametrize("shared", [False, True])
def test_layers_that_write_main_grad_write_into_the_sum(pool_of, shared):
    for world_size in (1, 2):
        exact = pool_of(world_size).run(main_grads, "exact", shared)
        fused = pool_of(world_size).run(main_grads, "fused", shared)
        for (expected, _), (actual, names) in zip(exact, fused, strict=True):
            assert "0.weight" in names
            for (name, value), (_, other) in zip(actual, expected, strict=True):
                torch.testing.assert_close(value, other, msg=lambda m, n=name: n + m)


def main_grad_with_gaps() -> dict[str, str]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(MainGradLinear(), nn.Linear(HIDDEN, DIM))
    lowtide.fully_shard(model, grads="fused")
    return lowtide.memory_report(model).fused.exact


def test_main_grad_with_gaps_stays_exact(pool_of):
    for exact in pool_of(3).run(main_grad_with_gaps):
        assert exact == {
            "MainGradLinear.weight": (
                "main_grad: a rank's rows are no multiple of 128 elements"
            )
        }


# -- gradients in blocks of rows -------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, DIM, padding_idx=8)
        self.head = nn.Linear(DIM, 301, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Twice, in two shapes: the calls are summed.
        x = self.embed(ids) * self.embed(ids.flip(0) // 2)
        return lowtide.losses.linear_cross_entropy(
            x, self.head, ids, chunking="vocabulary"
        )


def looked_up(grads: str, dtype: torch.dtype | None) -> tuple[Any, dict[str, str]]:
    large = mock.patch.object(embedding, "LARGE_TABLE", 0)
    with large, mock.patch.object(embedding, "LOOKUP_BYTES", 20 * 4 * DIM):
        torch.manual_seed(0)
        model: Any = Lookup()
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        for unit in (model.embed, model.head, model):
            lowtide.fully_shard(unit, mp_policy=policy, grads=grads)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        # Some rows many times.
        ids = torch.randint(30, (4, 50), generator=generator) * 4
        model(ids).backward()
        report = lowtide.memory_report(model).fused
        gradient = model.embed.weight.grad.full_tensor()
        return gradient, report.exact if report else {}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_a_large_embedding_are_summed_in_fp32(pool_of, ranks):
    (exact, _), *_ = pool_of(ranks).run(looked_up, "exact", None)
    (fused, why), *_ = pool_of(ranks).run(looked_up, "fused", None)
    # Call after call in the same rows, instead of sums of both.
    torch.testing.assert_close(fused, exact)
    assert why == {"head.weight": "its gradient comes in blocks of rows"}
    # bf16: each row's sum is rounded in the exact mode, not here.
    (rounded, _), *_ = pool_of(ranks).run(looked_up, "exact", torch.bfloat16)
    (summed, _), *_ = pool_of(ranks).run(looked_up, "fused", torch.bfloat16)
    assert (summed - exact).norm() < (rounded - exact).norm()
    assert torch.equal(summed[8], torch.zeros(DIM))
