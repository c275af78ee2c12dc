"""Rules for operators and autograd functions, and what is said without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from lowtide import spmd
from lowtide.spmd import COLLECTIVE, LINEAR, LOCAL, SAME_AS, P, R, V
from support.spmd import RANK, failure, function, inside, leaf, library_of, message


@pytest.fixture(scope="module")
def library() -> torch.library.Library:
    library = library_of("spmd_test")
    for name in ("opaque", "talking", "second", "overloaded", "overloaded.other"):
        extra = ", int n=0" if name == "overloaded.other" else ""
        library.define(f"{name}(Tensor x, Tensor? y=None{extra}) -> Tensor")

        def run(x: torch.Tensor, y: Any = None, n: int = 0) -> torch.Tensor:
            return x * 2 if y is None else y * 2

        library.impl(name, run, "CompositeExplicitAutograd")
    return library


def test_no_rule_for_an_operator(mesh: DeviceMesh, library: Any) -> None:
    def call() -> None:
        inside(
            torch.ops.spmd_test.opaque, leaf(4), in_types=R, out_types=R,
            mesh=mesh["model"],
        )  # fmt: skip

    text = failure(call)
    assert text == (
        "lowtide: region 'body': expected a replication rule for spmd_test::opaque, "
        f"got none at HERE {RANK}. If it does not communicate, "
        'write: lowtide.spmd.register_rule("spmd_test::opaque", lowtide.spmd.LOCAL)'
    )
    line = text.partition("write: ")[2]
    exec(line, {"lowtide": __import__("lowtide")})
    call()


def test_no_rule_for_an_autograd_function(mesh: DeviceMesh) -> None:
    unknown = function(lambda x: x * 2, lambda g: g * 2)

    def use(body: Callable[..., Any]) -> None:
        inside(body, leaf(4), in_types=R, out_types=R, mesh=mesh["model"])

    expected = (
        "lowtide: region 'body': expected a replication rule for the autograd function "
        f"HandWritten, got none at HERE {RANK}. If it does not communicate, write: "
        "lowtide.spmd.register_rule(function.<locals>.HandWritten, lowtide.spmd.LOCAL)"
    )
    assert failure(lambda: use(lambda x: unknown.apply(x) + 1)) == expected
    with pytest.raises(spmd.ReplicationError, match="autograd function HandWritten"):
        use(unknown.apply)
    spmd.register_rule(unknown, LOCAL)
    use(lambda x: unknown.apply(x) + 1)


def test_rules_for_overloads_packets_and_names(mesh: DeviceMesh, library: Any) -> None:
    ops = torch.ops.spmd_test

    def out(body: Callable[..., Any], type_: spmd.Type) -> None:
        inside(
            body, leaf(4), leaf(4), in_types=[R, V], out_types=type_,
            mesh=mesh["model"],
        )  # fmt: skip

    spmd.register_rule(ops.second, SAME_AS(1))
    out(lambda x, y: ops.second(x, y), V)
    out(lambda x, y: ops.second.default(x, y), V)
    spmd.register_rule("spmd_test::second", SAME_AS(0))
    out(lambda x, y: ops.second(x, y), R)
    spmd.register_rule(ops.overloaded.other, SAME_AS(1))
    out(lambda x, y: ops.overloaded(x, y, 3), V)
    with pytest.raises(spmd.ReplicationError, match="rule for spmd_test::overloaded"):
        out(lambda x, y: ops.overloaded(x), R)


def test_custom_operators_and_their_autograd(mesh: DeviceMesh) -> None:
    @torch.library.custom_op("spmd_test::custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    custom.register_autograd(lambda ctx, grad: grad * 2)
    spmd.register_rule(custom, LOCAL)
    y, run = inside(custom, leaf(4), in_types=R, out_types=R, mesh=mesh["model"])
    y.sum().backward()
    assert run.sent == {}


def test_bad_rules_are_refused() -> None:
    assert message(lambda: spmd.register_rule("gelu", LOCAL), ValueError) == (
        "lowtide: register_rule: expected a name with its namespace, got 'gelu'. Write "
        "'aten::gelu' for torch's own."
    )
    assert message(lambda: spmd.register_rule(len, LOCAL), TypeError) == (
        "lowtide: register_rule: expected an operator, an autograd function or a name, "
        "got <built-in function len>. Pass torch.ops.namespace.name, or "
        "'namespace::name'."
    )
    assert message(lambda: spmd.register_rule("a::b", "LOCAL"), TypeError) == (  # type: ignore[arg-type]
        "lowtide: register_rule: expected a rule, got 'LOCAL'. Pass LOCAL, LINEAR, "
        "MULTILINEAR, COLLECTIVE(src, dst) or SAME_AS(i)."
    )
    assert message(lambda: SAME_AS(-1), ValueError) == (
        "lowtide: SAME_AS: expected the index of a tensor input, from 0, got -1. Pass "
        "0 for the first."
    )
    assert [repr(r) for r in (LOCAL, LINEAR, SAME_AS(2), COLLECTIVE(P, R))] == [
        "LOCAL",
        "LINEAR",
        "SAME_AS(2)",
        "COLLECTIVE(P, R)",
    ]


def test_all_of_lowtides_operators_have_rules() -> None:
    import lowtide.losses  # noqa: F401
    from lowtide import _C

    names = torch._C._dispatch_get_all_op_names()
    own = {name.partition(".")[0] for name in names if name.startswith("lowtide::")}
    assert len(own) >= 4
    assert [name for name in sorted(own) if _C.find_rule(name) is None] == []


def test_tag_keeps_the_type(mesh: DeviceMesh) -> None:
    import lowtide

    y, _ = inside(
        lambda x: lowtide.tag(x * 2, "h"), leaf(4), in_types=V, out_types=V,
        mesh=mesh["model"],
    )  # fmt: skip
    assert y.shape == (4,)
