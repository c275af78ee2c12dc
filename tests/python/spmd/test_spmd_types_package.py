"""Together with the spmd_types package: our rules in its checker, its annotations in
our regions."""

from __future__ import annotations

from typing import Any

import pytest
import spmd_types
import spmd_types.checker
import torch
from torch.distributed.device_mesh import DeviceMesh

from lowtide import spmd
from lowtide.spmd import COLLECTIVE, LINEAR, LOCAL, MULTILINEAR, SAME_AS, P, R, V
from support.spmd import function, inside, leaf, library_of, reduced


def typed(tensor: torch.Tensor, mesh: DeviceMesh, type_: spmd.Type) -> torch.Tensor:
    axis = mesh.get_group("model")
    spmd_types.assert_type(tensor, {axis: getattr(spmd_types, str(type_))})
    return tensor


def type_in_its_checker(op: Any, mesh: DeviceMesh, *tensors: torch.Tensor) -> spmd.Type:
    with spmd_types.set_current_mesh(mesh["model"]), spmd_types.checker.typecheck():
        y = op(*tensors)
        found = spmd_types.get_axis_local_type(y, mesh.get_group("model"))
    return spmd.Type(found.value)


def test_its_annotations_are_read(mesh: DeviceMesh) -> None:
    x = typed(leaf(4), mesh, V)
    inside(lambda x: x * 2, x, in_types=V, out_types=V, mesh=mesh["model"])
    with pytest.raises(spmd.ReplicationError) as raised:
        inside(lambda x: x * 2, x, in_types=R, out_types=R, mesh=mesh["model"])
    assert "to be R over 'model', got V from the caller (spmd_types, " in str(
        raised.value
    )
    weight = typed(leaf(4), mesh, R)
    y, _ = inside(lambda x: x * weight, x, in_types=V, out_types=V, mesh=mesh["model"])
    assert y.shape == (4,)


def test_rules_of_autograd_functions_are_exported(mesh: DeviceMesh) -> None:
    model = mesh.get_group("model")

    def plain() -> Any:
        return function(lambda x: x * 2, lambda g: g * 2)

    local, linear, same = plain(), plain(), plain()
    gathers = function(lambda x: reduced(x, model), lambda g: reduced(g, model))
    spmd.register_rule(local, LOCAL)
    names = spmd.export_rules()  # what is there, and what comes later
    assert any("HandWritten" in name for name in names)
    spmd.register_rule(linear, LINEAR)
    spmd.register_rule(same, SAME_AS(0))
    promises = plain()
    spmd.register_rule(gathers, COLLECTIVE(P, R))
    spmd.register_rule(promises, COLLECTIVE(P, R))
    assert type_in_its_checker(local.apply, mesh, typed(leaf(4), mesh, V)) is V
    assert type_in_its_checker(linear.apply, mesh, typed(leaf(4), mesh, P)) is P
    assert type_in_its_checker(same.apply, mesh, typed(leaf(4), mesh, P)) is P
    assert type_in_its_checker(gathers.apply, mesh, typed(leaf(4), mesh, P)) is R
    with pytest.raises(spmd_types.SpmdTypeError, match="its source type"):
        type_in_its_checker(promises.apply, mesh, typed(leaf(4), mesh, R))


def test_rules_of_operators_are_exported(mesh: DeviceMesh) -> None:
    library = library_of("spmd_types_test")
    for name in ("sum", "product", "opaque", "gathers"):
        library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
        library.impl(name, lambda x, y: x + y, "CompositeExplicitAutograd")
    ops = torch.ops.spmd_types_test
    spmd.register_rule(ops.sum, LINEAR)
    spmd.register_rule("spmd_types_test::product", MULTILINEAR)
    spmd.register_rule(ops.opaque.default, LOCAL)
    spmd.register_rule(ops.gathers, COLLECTIVE(V, R))
    names = spmd.export_rules()
    assert {f"spmd_types_test::{n}" for n in ("sum", "product", "opaque")} < {*names}
    assert "spmd_types_test::gathers" not in names  # it has no such rule

    def pair(a: spmd.Type, b: spmd.Type) -> tuple[torch.Tensor, torch.Tensor]:
        return typed(leaf(4), mesh, a), typed(leaf(4), mesh, b)

    assert type_in_its_checker(ops.sum, mesh, *pair(P, P)) is P
    assert type_in_its_checker(ops.product, mesh, *pair(P, R)) is P
    assert type_in_its_checker(ops.opaque.default, mesh, *pair(R, V)) is V
    with pytest.raises(spmd_types.SpmdTypeError, match="linear op"):
        type_in_its_checker(ops.sum, mesh, *pair(P, R))
    with pytest.raises(spmd_types.SpmdTypeError, match="non-linear"):
        type_in_its_checker(ops.opaque, mesh, *pair(P, P))


def test_both_tables_have_the_same_rows(mesh: DeviceMesh) -> None:
    """Every transition of ours is one of theirs, and its gradient's types."""
    operations = {
        name: getattr(spmd_types, name)
        for name in (
            *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
            *("convert", "reinterpret"),
        )
    }
    for (name, src, dst), _ in spmd.transitions():
        x = typed(torch.randn(2, 4), mesh, src)
        types = {"src": getattr(spmd_types, str(src))}
        types["dst"] = getattr(spmd_types, str(dst))
        if name in ("convert", "reinterpret"):
            types["expert_mode"] = True

        def call(
            x: torch.Tensor, name: str = name, types: dict[str, Any] = types
        ) -> Any:
            return operations[name](x, mesh.get_group("model"), **types)

        assert type_in_its_checker(call, mesh, x) is dst, (name, src, dst)
        mine = getattr(spmd_types, str(src)).backward_type()
        assert mine.value == str(src.gradient)
