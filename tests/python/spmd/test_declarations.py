"""Regions whose declarations do not hold, and operators that their types forbid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lowtide import spmd
from lowtide.spmd import COLLECTIVE, SAME_AS, I, P, R, V
from support.spmd import RANK, failure, function, inside, leaf, message


def test_declared_against_inferred(mesh: DeviceMesh) -> None:
    def call() -> None:
        inside(
            lambda x, w: x @ w, leaf(2, 4), leaf(4, 2), in_types=[R, V], out_types=R,
            mesh=mesh["model"],
        )  # fmt: skip

    assert failure(call) == (
        "lowtide: region 'body': expected output 0 to be R over 'model', as declared, "
        f"got V, inferred at HERE {RANK}. Write spmd.all_gather(y, 'model', src=V, "
        "dst=R), or declare V."
    )


def test_the_caller_passes_another_type(mesh: DeviceMesh) -> None:
    x = leaf(4)
    with spmd.use_mesh(mesh["model"]):
        spmd.annotate(x, {"model": V})

        @spmd.region("mlp", {"x": R}, R)
        def mlp(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        assert failure(lambda: mlp(x)) == (
            "lowtide: region 'mlp': expected input 'x' to be R over 'model', got V "
            f"from the caller (annotate(), HERE) {RANK}. Convert it before the call, "
            "or declare what is passed."
        )
        y, _ = inside(lambda x: x * 2, x, in_types=V, out_types=V)
        assert "(region 'body', output 0, HERE)" in failure(lambda: mlp(y))


def test_operators_that_types_forbid(mesh: DeviceMesh) -> None:
    def text(body: Callable[..., Any], *types: spmd.Type) -> str:
        found = failure(
            lambda: inside(
                body, leaf(4), leaf(4), in_types=types, out_types=R, mesh=mesh["model"]
            )
        )
        return found.removeprefix("lowtide: region 'body': expected that ")

    reduce = (
        "Reduce it first: spmd.all_reduce(x, 'model', src=P, dst=R), or "
        "spmd.reduce_scatter(x, 'model')."
    )
    linear_only = "a partial sum (P) passes linear operators only, got "
    added = (
        "a partial sum (P) is added to partial sums only, and not multiplied by "
        "varying values (V), got "
    )
    assert text(lambda x, y: x.relu(), P, R) == (
        f"{linear_only}aten::relu(P) over 'model' at HERE {RANK}. {reduce}"
    )
    assert text(lambda x, y: x + 1, P, R) == (
        f"{added}aten::add(P, constant) over 'model' at HERE {RANK}. {reduce}"
    )
    assert text(lambda x, y: x * y, P, P) == (
        "one factor at most is a partial sum (P), got aten::mul(P, P) over 'model' at "
        f"HERE {RANK}. {reduce}"
    )
    assert text(lambda x, y: y / x, P, R) == (
        f"{linear_only}aten::div(R, P) over 'model' at HERE {RANK}. {reduce}"
    )
    assert text(lambda x, y: x * y, I, V) == (
        "invariant values (I) meet invariant values only, got aten::mul(I, V) over "
        f"'model' at HERE {RANK}. Convert the invariant one: spmd.convert(x, 'model', "
        "src=I, dst=R); its backward is an all-reduce."
    )
    assert text(lambda x, y: y * float(x.sum()), V, R) == (
        "a Python number is the same on all ranks, got aten::__float__(V) over 'model' "
        f"at HERE {RANK}. {reduce}"
    )


def test_a_write_that_changes_the_type(mesh: DeviceMesh) -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 1).add_(y)

    found = failure(
        lambda: inside(
            body, leaf(4), leaf(4), in_types=[R, V], out_types=V, mesh=mesh["model"]
        )
    )
    assert found == (
        "lowtide: region 'body': expected aten::add_ to leave its first input R over "
        f"'model', got V at HERE {RANK}. Write it out of place, or convert the first "
        "input before."
    )


def test_a_tensor_from_elsewhere(mesh: DeviceMesh) -> None:
    other = torch.randn(4)
    found = failure(
        lambda: inside(
            lambda x: x * other, leaf(4), in_types=R, out_types=R, mesh=mesh["model"]
        )
    )
    assert found == (
        "lowtide: region 'body': expected to know what input 1 of aten::mul is over "
        f"'model', got float32[4] from outside of the region at HERE {RANK}. Declare "
        "it in in_types, or call spmd.annotate(tensor, {axis: R, I, V or P}) where it "
        "is made."
    )


def test_a_typed_collective_of_another_type(mesh: DeviceMesh) -> None:
    found = failure(
        lambda: inside(
            lambda x: spmd.all_reduce(x, "model"),
            leaf(4),
            in_types=V,
            out_types=R,
            mesh=mesh["model"],
        )  # fmt: skip
    )
    assert found == (
        "lowtide: spmd.all_reduce: expected a tensor of type P over 'model', got V at "
        "HERE. Pass src= its type if the table has that pair, or convert it first."
    )


def test_wrong_declarations(mesh: DeviceMesh) -> None:
    def declare(**declared: Any) -> str:
        return message(lambda: inside(lambda x: x, leaf(4), **declared), ValueError)

    assert declare(in_types=R, out_types=R) == (
        "lowtide: region 'body': expected a mesh, got none. Pass mesh=, or call inside "
        "`with lowtide.spmd.use_mesh(mesh)`."
    )
    assert declare(in_types={"data": R}, out_types=R, mesh=mesh) == (
        "lowtide: region 'body', input '0': expected a type for every axis, got none "
        "for ['model']. Write one of R, I, V, P."
    )
    assert declare(in_types=[R, R], out_types=R, mesh=mesh) == (
        "lowtide: region 'body': expected 2 input tensors, got 1. Declare one entry "
        "for each."
    )
    assert declare(in_types=R, out_types=R, mesh=mesh, check=False) == (
        "lowtide: region 'body': expected grad_types with check=False, got none. Say "
        "what the gradient of every input is, as the operators are not looked at."
    )
    assert message(
        lambda: inside(
            lambda x: x, leaf(4), in_types=R, out_types=R, grad_types=R, mesh=mesh
        ),
        spmd.ReplicationError,
    ) == (
        "lowtide: region 'body': expected the gradient of input '0' to be declared P "
        f"over 'data', as R has it, got R {RANK}. Leave grad_types out: with "
        "check=True gradients follow from the types."
    )

    def without_outputs() -> None:
        with spmd.region("body", [], R, mesh=mesh) as run:
            run.inputs()

    assert message(without_outputs, RuntimeError) == (
        "lowtide: region 'body': expected outputs(), got none. Pass what leaves the "
        "region to outputs()."
    )


def test_rules_that_do_not_fit_their_operator(mesh: DeviceMesh) -> None:
    def call(rule: spmd.Rule) -> str:
        op = function(lambda x: x * 2, lambda g: g)
        spmd.register_rule(op, rule)
        return failure(
            lambda: inside(
                lambda x: op.apply(x),
                leaf(4),
                in_types=V,
                out_types=V,
                mesh=mesh["model"],
            )  # fmt: skip
        )

    got = "got support.spmd.function.<locals>.HandWritten(V) over 'model' at HERE"
    who = "lowtide: region 'body': expected that "
    assert call(COLLECTIVE(P, R)) == (
        f"{who}the collective's first input has its source type, {got} {RANK}. Convert "
        "the input first, or register the rule with its type."
    )
    assert call(SAME_AS(3)) == (
        f"{who}the rule names one of the tensor inputs, {got} {RANK}. Register the "
        "rule with an index below the number of tensor inputs."
    )
    assert message(lambda: spmd.all_gather(leaf(4), mesh), ValueError) == (
        "lowtide: axis: expected a mesh of one dimension, got 2. Pass mesh['name']."
    )
