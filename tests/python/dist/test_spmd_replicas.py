"""Debug mode on gloo: replicas are compared, and the operator at fault is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide import spmd
from lowtide.spmd import COLLECTIVE, LOCAL, SAME_AS, I, P, R, V
from support.spmd import function, inside, reduced


def mesh() -> DeviceMesh:
    """2 x 2 of four ranks, or 1 x 2 of two."""
    shape = (dist.get_world_size() // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))


def outcome(call: Callable[[], Any]) -> str:
    with spmd.compare_replicas():
        try:
            call()
        except spmd.ReplicationError as error:
            return str(error)
    return ""


def run(body: Callable[..., Any], *inputs: torch.Tensor, **declared: Any) -> str:
    def call() -> None:
        y, _ = inside(body, *inputs, **declared)
        if y.requires_grad:
            y.sum().backward()

    return outcome(call)


def equal(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, requires_grad=True)


def wrong_rule() -> str:
    """The operator's values depend on the rank along "model", which LOCAL denies."""
    both = mesh()
    place = both.get_local_rank("model")
    op = function(lambda x: x + place, lambda g: g)
    spmd.register_rule(op, LOCAL)
    return run(
        lambda x: op.apply(x * 2) * 3, equal(4), in_types=R, out_types=R, mesh=both
    )


def wrong_promise() -> str:
    """SAME_AS(0) for what takes its second input's type."""
    both = mesh()
    op = function(lambda x: x + both.get_local_rank("data"), lambda g: g)
    spmd.register_rule(op, SAME_AS(0))
    return run(lambda x: op.apply(x), equal(4), in_types=I, out_types=I, mesh=both)


def wrong_backward() -> str:
    """The gradient of an invariant input, from a backward that forgot to reduce."""
    both = mesh()
    place = both.get_local_rank("model")
    op = function(lambda x: x * 2, lambda g: g * (1 + place))
    spmd.register_rule(op, LOCAL)
    return run(lambda x: op.apply(x) + 1, equal(4), in_types=I, out_types=I, mesh=both)


def wrong_backward_of_a_sum() -> str:
    """P -> I by hand: the gradient of a partial sum is replicated, but is not here."""
    both = mesh()
    model = both.get_group("model")
    op = function(lambda x: reduced(x, model), lambda g: g * model.rank())
    spmd.register_rule(op, COLLECTIVE(P, I))
    return run(
        lambda x: op.apply(x * 1),
        equal(4),
        in_types={"data": I, "model": P},
        out_types=I,
        mesh=both,
    )


def unequal_input() -> str:
    x = torch.full((4,), float(dist.get_rank()))
    return run(lambda x: x * 2, x, in_types=R, out_types=R, mesh=mesh()["model"])


def unequal_constant() -> str:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(float(dist.get_rank()))

    return run(body, equal(4), in_types=R, out_types=R, mesh=mesh()["model"])


def unequal_gradient_from_the_caller() -> str:
    def call() -> None:
        y, _ = inside(
            lambda x: x * 2, equal(4), in_types=I, out_types=I, mesh=mesh()["model"]
        )
        (y * dist.get_rank()).sum().backward()

    return outcome(call)


def other_operators() -> str:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if dist.get_rank() % 2 else (x * 2) + 0

    return run(body, equal(4), in_types=R, out_types=R, mesh=mesh()["model"])


def nothing_wrong() -> str:
    both = mesh()

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = spmd.convert(x, "model", src=I, dst=R)
        y = spmd.reinterpret(x @ w, "model", src=V, dst=P)
        return spmd.all_reduce(y, "model", dst=I)

    torch.manual_seed(dist.get_rank())
    w = torch.randn(4, 4, requires_grad=True)
    return run(
        body,
        equal(4, 4),
        w,
        in_types=[{"data": V, "model": I}, {"data": V, "model": V}],
        out_types={"data": V, "model": I},
        mesh=both,
    )


def only_when_asked() -> bool:
    x = torch.full((4,), float(dist.get_rank()))
    y, _ = inside(lambda x: x, x, in_types=R, out_types=R, mesh=mesh()["model"])
    return bool(torch.equal(y, x))


def texts(pool_of: Any, case: Callable[[], str], size: int = 2) -> list[str]:
    found = pool_of(size).run(case)
    for rank, text in enumerate(found):
        assert f"(rank {rank} of {size})" in text, "every rank raises"
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_wrong_rule_is_named_with_its_axis(pool_of: Any, size: int) -> None:
    for text in texts(pool_of, wrong_rule, size):
        assert (
            "expected the output of support.spmd.function.<locals>.HandWritten" in text
        )
        assert "to be equal over 'model', as its type R says" in text
        assert "got other values on ranks [1] of the axis" in text
        assert text.endswith("Correct the rule, which does not hold over 'model'.")


def test_a_wrong_promise_on_the_other_axis(pool_of: Any) -> None:
    for text in texts(pool_of, wrong_promise, 4):
        assert "HandWritten at" in text and "equal over 'data', as its type I" in text


def test_a_wrong_backward_is_named(pool_of: Any) -> None:
    for text in texts(pool_of, wrong_backward):
        assert "expected the gradient of input '0' at" in text
        assert "to be equal over 'model', as I requires" in text
        assert "on ranks [1] of the axis, from the backward of support.spmd" in text
        assert "HandWritten at tests/python/dist/test_spmd_replicas.py:" in text
        assert text.endswith("Correct that backward, or the rule.")


def test_a_wrong_backward_of_a_sum(pool_of: Any) -> None:
    for text in texts(pool_of, wrong_backward_of_a_sum):
        assert "expected the gradient of aten::mul at" in text
        assert "as P requires" in text and "HandWritten at" in text


def test_unequal_inputs_and_constants(pool_of: Any) -> None:
    for text in texts(pool_of, unequal_input):
        assert "expected input '0' at" in text
        assert text.endswith("Correct what is passed, or declare V.")
    for text in texts(pool_of, unequal_constant):
        assert "expected the output of aten::tensor at" in text
        assert "as its type constant says" in text


def test_unequal_gradients_from_the_caller(pool_of: Any) -> None:
    for text in texts(pool_of, unequal_gradient_from_the_caller):
        assert "the gradient of aten::mul at" in text
        assert "from the region's caller" in text


def test_ranks_that_run_other_operators(pool_of: Any) -> None:
    for text in texts(pool_of, other_operators):
        assert "expected the same operators on all ranks of 'model', got [3, 2]" in text
        assert text.endswith("Make control flow the same on all ranks.")


@pytest.mark.parametrize("size", [2, 4])
def test_right_regions_pass(pool_of: Any, size: int) -> None:
    assert pool_of(size).run(nothing_wrong) == [""] * size


def test_nothing_is_compared_outside(pool_of: Any) -> None:
    assert pool_of(2).run(only_when_asked) == [True, True]
