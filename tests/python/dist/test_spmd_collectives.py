"""Typed collectives on gloo, forward and backward, against finite differences of what
their types mean: one function of all ranks' values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide import spmd
from lowtide.spmd import I, P, R, Type, V

Tensors = list[torch.Tensor]
SHAPE = (4, 4)  # divides by 2 and 4 along both dimensions
OPERATIONS = {
    "all_gather": spmd.all_gather,
    "reduce_scatter": spmd.reduce_scatter,
    "all_reduce": spmd.all_reduce,
    "all_to_all": spmd.all_to_all,
    "convert": spmd.convert,
    "reinterpret": spmd.reinterpret,
}
STEPS = [forward for forward, _ in spmd.transitions()]
WAY_BACK = dict(spmd.transitions())
HAS_DIM = ("all_gather", "reduce_scatter", "convert")


def name(step: tuple[str, Type, Type]) -> str:
    return f"{step[0]}-{step[1].value}-{step[2].value}"


def options(operation: str, dim: int) -> dict[str, int]:
    if operation == "all_to_all":
        return {"split_dim": dim, "concat_dim": 1 - dim}
    return {"dim": dim} if operation in HAS_DIM else {}


# What a step means: the outputs of all ranks from the inputs of all ranks.


def dense(step: tuple[str, Type, Type], xs: Tensors, dim: int) -> Tensors:
    operation, src, dst = step
    size = len(xs)
    if operation == "all_gather":
        return [torch.cat(xs, dim)] * size
    if operation == "all_reduce":
        return [sum(xs[1:], xs[0])] * size
    if operation == "reduce_scatter":
        return list(sum(xs[1:], xs[0]).chunk(size, dim))
    if operation == "all_to_all":
        parts = [x.chunk(size, dim) for x in xs]
        return [torch.cat([p[r] for p in parts], 1 - dim) for r in range(size)]
    if operation == "convert" and dst is V:
        return [x.chunk(size, dim)[r] for r, x in enumerate(xs)]
    if operation == "convert" and src is V:
        return [
            torch.cat([x if r == s else torch.zeros_like(x) for s in range(size)], dim)
            for r, x in enumerate(xs)
        ]
    if operation == "convert" and dst is P:
        return [x if r == 0 else torch.zeros_like(x) for r, x in enumerate(xs)]
    return xs


def per_rank(type_: Type, size: int, make: Callable[[], torch.Tensor]) -> Tensors:
    """Values of a type: equal where it says so."""
    values = [make() for _ in range(size)]
    return [values[0]] * size if type_ in (R, I) else values


def loss(outs: Tensors, cotangents: Tensors, dst: Type) -> float:
    """The scalar whose derivative by ``outs`` is ``cotangents``, whose type is the
    gradient's."""
    if dst is P:
        outs = [sum(outs[1:], outs[0])]
    if dst is I:
        outs = outs[:1]
    return float(sum((c * o).sum() for c, o in zip(cotangents, outs, strict=False)))


def derivative(
    step: tuple[str, Type, Type], xs: Tensors, cotangents: Tensors, dim: int
) -> Tensors:
    """By central differences: of each rank's own value where it is V or P, of the
    common one where it is R or I."""
    _, src, dst = step
    grads = [torch.zeros_like(x) for x in xs]
    for rank, index in itertools.product(range(len(xs)), range(xs[0].numel())):
        values = []
        for shift in (0.5, -0.5):
            moved = [x.clone() for x in xs]
            for other, x in enumerate(moved):
                if src in (R, I) or other == rank:
                    x.view(-1)[index] += shift
            values.append(loss(dense(step, moved, dim), cotangents, dst))
        grads[rank].view(-1)[index] = values[0] - values[1]  # linear: exact
    return grads


def run_step(
    operation: str, src: str, dst: str, dim: int, xs: Tensors, cotangents: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    x = xs[group.rank()].clone().requires_grad_()
    y = OPERATIONS[operation](
        x, group, src=Type(src), dst=Type(dst), **options(operation, dim)
    )
    y.backward(cotangents[group.rank()])
    assert x.grad is not None
    return y.detach(), x.grad


def differentiate_twice(src: str, dst: str, operation: str) -> list[bool]:
    """The derivative of <c, g(v)> by v, where g is the step's backward, is the step:
    gradients of gradients take the forward's way."""
    group = dist.group.WORLD
    assert group is not None
    step = OPERATIONS[operation]
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    y = step(x, group, src=Type(src), dst=Type(dst))
    v = torch.randn_like(y).requires_grad_()
    (grad,) = torch.autograd.grad(y, x, v, create_graph=True)
    c = torch.randn_like(grad)
    (second,) = torch.autograd.grad(grad, v, c)
    return [torch.equal(second, step(c, group, src=Type(src), dst=Type(dst)).detach())]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("step", STEPS, ids=name)
def test_forward_and_backward_mean_what_the_types_say(
    pool_of: Any, step: tuple[str, Type, Type], size: int
) -> None:
    operation, src, dst = step
    torch.manual_seed(size)
    for dim in (0, 1) if options(operation, 0) else (0,):

        def make() -> torch.Tensor:
            return torch.randn(SHAPE, dtype=torch.float64)

        xs = per_rank(src, size, make)
        outs = dense(step, xs, dim)
        cotangents = per_rank(dst.gradient, size, lambda: torch.randn_like(outs[0]))  # noqa: B023
        seen = pool_of(size).run(
            run_step, operation, src.value, dst.value, dim, xs, cotangents
        )
        for (y, _), expected in zip(seen, outs, strict=True):
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        grads = [grad for _, grad in seen]
        expected_grads = derivative(step, xs, cotangents, dim)
        if src is R:  # parts of the gradient, one on each rank
            grads, expected_grads = [sum(grads[1:], grads[0])], expected_grads[:1]
        for grad, expected in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("step", STEPS, ids=name)
def test_double_backward_takes_the_forwards_way(
    pool_of: Any, step: tuple[str, Type, Type]
) -> None:
    operation, src, dst = step
    seen = pool_of(2).run(differentiate_twice, src.value, dst.value, operation)
    assert seen == [[True], [True]]


def bf16_and_views() -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(8, dtype=torch.bfloat16).view(2, 4).t() + group.rank()
    gathered = spmd.all_gather(x, group, dim=1)
    whole = [torch.arange(8, dtype=torch.bfloat16).view(2, 4).t() + r for r in (0, 1)]
    reduced = spmd.reduce_scatter(x, group, dim=0)
    summed = (whole[0] + whole[1]).chunk(2, 0)[group.rank()]
    return [
        torch.equal(gathered, torch.cat(whole, 1)),
        torch.equal(reduced, summed),
        gathered.is_contiguous(),
    ]


def test_other_layouts_and_dtypes(pool_of: Any) -> None:
    assert pool_of(2).run(bf16_and_views) == [[True] * 3] * 2


def messages() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    calls: list[Callable[[], Any]] = [
        lambda: spmd.reduce_scatter(torch.ones(3), group),
        lambda: spmd.all_gather(torch.ones(()), group),
        lambda: spmd.all_reduce(torch.ones(2), group, src=R),
        lambda: spmd.all_reduce(torch.ones(2), "tp"),
        lambda: spmd.all_reduce(spmd.annotate(torch.ones(2), {group: V}), group),
    ]
    found = []
    for call in calls:
        try:
            call()
        except (ValueError, spmd.ReplicationError) as error:
            found.append(str(error))
    return found


def test_messages(pool_of: Any) -> None:
    uneven, scalar, pair, unknown, annotated = pool_of(2).run(messages)[1]
    assert uneven == (
        "lowtide: lowtide.spmd.reduce_scatter: expected dimension 0 to be a multiple "
        "of 2, the axis's ranks, got 3 (rank 1 of 2). Pad it, or pass another dim=."
    )
    assert scalar == (
        "lowtide: lowtide.spmd.all_gather: expected a dimension of the tensor, got 0 "
        "of 0 (rank 1 of 2). Pass dim= one that the tensor has; a scalar needs "
        "unsqueeze(0)."
    )
    assert pair == (
        "lowtide: all_reduce: expected one of P -> R, P -> I, got R -> R. "
        "docs/replication_rules.md has the table."
    )
    assert unknown.startswith(
        "lowtide: axis: expected one of the current mesh, got 'tp' (no current mesh)."
    )
    assert annotated.startswith(
        "lowtide: spmd.all_reduce: expected a tensor of type P over 'default_pg', got "
        "V at "
    )
    assert "test_spmd_collectives.py:" in annotated
