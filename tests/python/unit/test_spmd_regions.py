"""Regions on a fake 4 x 2 mesh: types inferred, collectives counted, messages."""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from lowtide import spmd
from lowtide.spmd import COLLECTIVE, LINEAR, LOCAL, SAME_AS, I, P, R, V
from support.spmd import fake_mesh, function, inside, leaf, reduced

# Lines of these files move.
FILES = (__file__, inspect.getfile(inside))
HERE = "|".join(re.escape(os.path.relpath(file)) for file in FILES)
RANK = "(rank 3 of 8)"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as mesh:
        yield mesh


@pytest.fixture
def model(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group("model")


def message(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return re.sub(rf"({HERE}):\d+", "HERE", str(raised.value))


def failure(call: Callable[[], Any]) -> str:
    return message(call, spmd.ReplicationError)


# Types and what backward sends.


def test_a_column_and_row_parallel_mlp(mesh: DeviceMesh) -> None:
    @spmd.region("mlp", {"x": I, "up": V, "down": V}, I, mesh=mesh["model"])
    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x = spmd.convert(x, "model", src=I, dst=R)
        part = F.gelu(x @ up, approximate="tanh") @ down
        part = spmd.reinterpret(part, "model", src=V, dst=P)
        return spmd.all_reduce(part, "model", dst=I)

    x, up, down = leaf(2, 4), leaf(4, 8), leaf(8, 4)
    y = mlp(x, up, down)
    y.sum().backward()
    assert all(t.grad is not None for t in (x, up, down))
    assert spmd.types_of(y, (spmd.Axis("model", mesh.get_group("model")),)) == {
        "model": I
    }


@pytest.mark.parametrize(
    ("src", "dst", "operation", "sent"),
    [
        (V, R, spmd.all_gather, {"reduce-scatter": (1, 64)}),
        (V, I, spmd.all_gather, {}),
        (P, V, spmd.reduce_scatter, {"all-gather": (1, 32)}),
        (P, R, spmd.all_reduce, {"all-reduce": (1, 32)}),
        (P, I, spmd.all_reduce, {}),
        (V, V, spmd.all_to_all, {"all-to-all": (1, 32)}),
        (I, R, spmd.convert, {"all-reduce": (1, 32)}),
        (I, V, spmd.convert, {"all-gather": (1, 32)}),
        (R, V, spmd.convert, {}),
        (V, P, spmd.convert, {}),
        (R, P, spmd.reinterpret, {}),
    ],
)
def test_backward_sends_what_the_table_says(
    mesh: DeviceMesh,
    src: spmd.Type,
    dst: spmd.Type,
    operation: Callable[..., torch.Tensor],
    sent: dict[str, tuple[int, int]],
) -> None:
    y, run = inside(
        lambda x: operation(x * 2, "model", src=src, dst=dst),
        leaf(8),
        in_types=src,
        out_types=dst,
        mesh=mesh["model"],
    )
    y.sum().backward()
    assert run.sent == sent


def test_without_a_gradient_nothing_is_required(mesh: DeviceMesh) -> None:
    y, run = inside(
        lambda x, w: spmd.convert(x, "model", src=I, dst=R) * w,
        torch.randn(4),
        leaf(4),
        in_types=[I, R],
        out_types=R,
        mesh=mesh["model"],
    )
    y.sum().backward()
    assert run.sent == {}


def test_every_axis_has_its_own_type(mesh: DeviceMesh) -> None:
    y, run = inside(
        lambda x, w: spmd.all_gather(x, "data") * w,
        leaf(4),
        leaf(16),
        in_types=[{"data": V, "model": R}, {"data": R, "model": V}],
        out_types={"data": R, "model": V},
        mesh=mesh,
    )
    y.sum().backward()
    assert run.sent == {"reduce-scatter": (1, 64)}


def test_axes_may_be_groups(mesh: DeviceMesh, model: dist.ProcessGroup) -> None:
    y, _ = inside(
        lambda x: spmd.all_gather(x, model),
        leaf(4),
        in_types={model: V},
        out_types={model: R},
    )
    assert y.shape == (8,)


def test_the_current_mesh(mesh: DeviceMesh) -> None:
    with spmd.use_mesh(mesh["model"]):
        y, _ = inside(lambda x: x + 1, leaf(4), in_types=R, out_types=R)
    assert y.shape == (4,)


def test_several_backwards_and_partial_ones(mesh: DeviceMesh) -> None:
    x, w = leaf(4), leaf(4)
    (y, z), run = inside(
        lambda x, w: (spmd.convert(x, "model", src=I, dst=R) * 2, w * 3),
        x,
        w,
        in_types=[I, V],
        out_types=[R, V],
        mesh=mesh["model"],
    )
    torch.autograd.grad(z.sum(), w, retain_graph=True)
    assert run.sent == {}
    for calls in (1, 2):
        torch.autograd.grad(y.sum() + z.sum(), [x, w], retain_graph=True)
        assert run.sent["all-reduce"][0] == calls


def test_regions_inside_regions(mesh: DeviceMesh) -> None:
    shard = leaf(4)
    with spmd.region("outer", V, V, mesh=mesh["model"]) as outer:
        (x,) = outer.inputs(shard)
        gathered = spmd.all_gather(x * 2, "model")
        y, inner = inside(
            lambda g: spmd.convert(g + 1, "model", src=R, dst=V),
            gathered,
            in_types=R,
            out_types=V,
            mesh=mesh["model"],
        )
        y = outer.outputs(y * 3)
    y.sum().backward()
    assert shard.grad is not None
    assert outer.sent == {"reduce-scatter": (1, 32)} and inner.sent == {}


def test_recomputation_is_forward(mesh: DeviceMesh) -> None:
    @spmd.region("block", V, V, mesh=mesh["model"])
    def block(x: torch.Tensor) -> torch.Tensor:
        return spmd.convert(spmd.all_gather(x, "model").sin(), "model", src=R, dst=V)

    x = leaf(4)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_listening_ends_with_the_graph(mesh: DeviceMesh) -> None:
    y, run = inside(
        lambda x: x * 2, leaf(4), in_types=R, out_types=R, mesh=mesh["model"]
    )
    del y, run
    gc.collect()
    from lowtide import _C

    first, second = _C.RegionRecord(), _C.RegionRecord()
    first.open()
    second.open()  # one listener for both
    assert first.close() == second.close() == []


def test_parameters_are_annotated_once(mesh: DeviceMesh) -> None:
    layer = torch.nn.Linear(4, 8, bias=False)
    with spmd.use_mesh(mesh["model"]):
        spmd.annotate(layer.weight, {"model": V})
        y, _ = inside(layer, leaf(2, 4), in_types=R, out_types=V)
        assert y.shape == (2, 8)
        assert failure(lambda: spmd.annotate(layer.weight, {"model": I})) == (
            "lowtide: annotate: expected I over 'model', got V from annotate(). "
            "Convert the tensor, or annotate it once."
        )


TYPED = {
    "sum of partial sums": (lambda a, b: a + b - a, [P, P], P),
    "scaled partial sum": (lambda a, b: 2 * a / 3, [P, R], P),
    "product with a replica": (lambda a, b: a @ b, [P, R], P),
    "views": (lambda a, b: a.t()[0].reshape(2, 2).mT, [P, R], P),
    "linear without bias": (lambda a, b: F.linear(a, b), [P, R], P),
    "replica and constant": (lambda a, b: a + torch.ones(4) + 1, [R, R], R),
    "varying wins": (lambda a, b: F.softmax(a * b, -1), [R, V], V),
    "invariant stays": (lambda a, b: F.layer_norm(a, (4,)) * b, [I, I], I),
    "random numbers vary": (lambda a, b: a + torch.rand(4), [R, R], V),
    "attention": (
        lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None])[0],
        [V, V],
        V,
    ),
    "cross entropy": (
        lambda a, b: F.cross_entropy(a, torch.zeros(4, dtype=torch.long)) * b,
        [R, R],
        R,
    ),
    "in place": (lambda a, b: (a * 1).add_(b).relu_(), [V, R], V),
    "a buffer that is filled": (
        lambda a, b: torch.zeros(4, 4).copy_(a),
        [V, R],
        V,
    ),
    "a slice that is written": (lambda a, b: write(a), [V, V], V),
}  # fmt: skip


def write(a: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 4)
    buffer[0] = a[0]
    return buffer


@pytest.mark.parametrize("case", TYPED, ids=lambda case: case.replace(" ", "_"))
def test_types_are_inferred(mesh: DeviceMesh, case: str) -> None:
    body, in_types, out = TYPED[case]
    inside(
        body, leaf(4, 4), leaf(4, 4), in_types=in_types, out_types=out,
        mesh=mesh["model"],
    )  # fmt: skip


# Rules.


@pytest.fixture(scope="module")
def library() -> torch.library.Library:
    library = torch.library.Library("spmd_test", "DEF")
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


# Declarations that do not hold.


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


# Collectives that the types do not require.


def test_an_unexpected_backward_collective(
    mesh: DeviceMesh, model: dist.ProcessGroup
) -> None:
    """The report this comes from: an all-reduce over the second axis and a factor of
    1/2 that nobody wrote."""
    silent = function(lambda x: x * 2, lambda g: reduced(g, model) * 2 / 2)
    spmd.register_rule(silent, LOCAL)
    x = torch.randn(1, 128, dtype=torch.bfloat16, requires_grad=True)
    y, run = inside(lambda x: silent.apply(x), x, in_types=R, out_types=R, mesh=mesh)
    name = f"{silent.__module__}.{silent.__qualname__}"
    assert failure(y.sum().backward) == (
        "lowtide: region 'body': expected no all-reduce over 'model' here in backward, "
        "as the types require none, got one of bfloat16[1, 128] (256 B) from the "
        f"backward of {name}, called at HERE {RANK}. Leave it out of that backward; if "
        "the operator communicates, register COLLECTIVE(src, dst)."
    )
    assert run.sent == {"all-reduce": (1, 256)}


def senders(model: dist.ProcessGroup) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Ways to send that a Python mode around forward does not see."""
    other = dist.new_group(dist.get_process_group_ranks(model))
    return {
        "dist": lambda g: dist.all_reduce(g, group=model),
        "functional": lambda g: funcol.all_reduce(g, "sum", model).wait(),
        "process group": lambda g: model.allreduce([g]),
        "another group over these ranks": lambda g: dist.all_reduce(g, group=other),
        "world": lambda g: dist.all_reduce(g),
        "a hook": lambda g: None,
    }


@pytest.mark.parametrize(
    "way",
    ["dist", "functional", "process group", "another group over these ranks", "world"],
)
def test_whoever_sends_is_seen(
    mesh: DeviceMesh, model: dist.ProcessGroup, way: str
) -> None:
    send = senders(model)[way]

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        send(gradient.clone())
        return gradient

    quiet = function(lambda x: x * 2, backward)
    spmd.register_rule(quiet, LOCAL)
    y, run = inside(
        lambda x: quiet.apply(x), leaf(4), in_types=R, out_types=R, mesh=mesh["model"]
    )
    with pytest.raises(spmd.ReplicationError, match="no all-reduce over 'model' here"):
        y.sum().backward()
    assert run.sent["all-reduce"] == (1, 16)


def test_a_hook_in_the_region_is_seen(
    mesh: DeviceMesh, model: dist.ProcessGroup
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h.register_hook(lambda g: reduced(g, model))
        return h + 1

    y, _ = inside(body, leaf(4), in_types=R, out_types=R, mesh=mesh["model"])
    with pytest.raises(spmd.ReplicationError, match="backward of aten::mul, called at"):
        y.sum().backward()


def test_other_axes_and_other_nodes_are_not_the_regions(
    mesh: DeviceMesh, model: dist.ProcessGroup
) -> None:
    across = mesh.get_group("data")
    sends = function(lambda x: x * 2, lambda g: reduced(reduced(g, across), model))
    spmd.register_rule(sends, LOCAL)
    x = sends.apply(leaf(4))  # before the region
    y, run = inside(lambda x: x * 2, x, in_types=R, out_types=R, mesh=mesh["model"])
    sends.apply(y).sum().backward()  # and after it
    assert run.sent == {}
    only_across = function(lambda x: x * 2, lambda g: reduced(g, across))
    spmd.register_rule(only_across, LOCAL)
    y, run = inside(
        lambda x: only_across.apply(x), leaf(4), in_types=R, out_types=R,
        mesh=mesh["model"],
    )  # fmt: skip
    y.sum().backward()
    assert run.sent == {"all-reduce": (1, 16)}


def test_a_collective_operator_must_send(
    mesh: DeviceMesh, model: dist.ProcessGroup
) -> None:
    def call(backward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        op = function(lambda x: reduced(x, model), backward)
        spmd.register_rule(op, COLLECTIVE(P, R))
        y, _ = inside(
            lambda x: op.apply(x), leaf(4), in_types=P, out_types=R, mesh=mesh["model"]
        )
        y.sum().backward()

    call(lambda g: reduced(g, model))
    found = failure(lambda: call(lambda g: g))
    assert "expected one all-reduce over 'model' in the backward of " in found
    assert found.endswith(
        "called at HERE, as its types require, got none (rank 3 of 8). Add it to that "
        "backward, or correct the types."
    )
    twice = failure(lambda: call(lambda g: reduced(reduced(g, model), model)))
    assert "expected no all-reduce over 'model' here in backward" in twice


def test_forward_calls_are_typed(mesh: DeviceMesh, model: dist.ProcessGroup) -> None:
    sends = function(lambda x: reduced(x, model), lambda g: g)
    spmd.register_rule(sends, LOCAL)

    def call(body: Callable[..., Any]) -> str:
        return failure(
            lambda: inside(body, leaf(4), in_types=V, out_types=V, mesh=mesh["model"])
        )

    found = call(lambda x: sends.apply(x))
    assert found.endswith(
        "whose rule is LOCAL, got an all-reduce of float32[4] (16 B) over 'model' at "
        f"HERE {RANK}. Register COLLECTIVE(src, dst), or leave the call out."
    )

    def raw(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y.detach(), group=model)
        return y

    assert call(raw) == (
        "lowtide: region 'body': expected typed collectives only, got an all-reduce of "
        f"float32[4] (16 B) over 'model' in forward {RANK}. Use those of lowtide.spmd, "
        "or an operator with a COLLECTIVE rule."
    )


def test_a_collective_needs_one_axis(mesh: DeviceMesh) -> None:
    op = function(lambda x: x * 2, lambda g: g)
    spmd.register_rule(op, COLLECTIVE(V, R))
    types = {"data": V, "model": V}

    def call() -> None:
        inside(
            lambda x: op.apply(x), torch.randn(4), in_types=types,
            out_types={"data": V, "model": R}, mesh=mesh,
        )  # fmt: skip

    assert "communicates over, got ['data', 'model'] at HERE" in failure(call)
    spmd.register_rule(op, COLLECTIVE(V, R), axis="model")
    call()


def test_unchecked_regions_require_what_grad_types_say(
    mesh: DeviceMesh, model: dist.ProcessGroup
) -> None:
    """As Megatron's copy to the model-parallel region: its backward reduces."""
    copy = function(lambda x: x.clone(), lambda g: reduced(g, model))

    def run(grad_types: Any, body: Any = copy.apply) -> dict[str, Any]:
        y, run = inside(
            body, leaf(4), in_types=R, out_types=R, grad_types=grad_types, check=False,
            mesh=mesh["model"],
        )  # fmt: skip
        y.sum().backward()
        return run.sent

    assert run([R]) == {"all-reduce": (1, 16)}
    assert run(P, lambda x: x * 2) == {}
    with pytest.raises(spmd.ReplicationError, match="no all-reduce over 'model' here"):
        run(P)
    assert failure(lambda: run(R, lambda x: x * 2)) == (
        "lowtide: region 'body': expected one all-reduce over 'model' in the backward "
        f"of the gradient of '0', as its types require, got none {RANK}. Add it to "
        "that backward, or correct the types."
    )


# A shard that changes.


def test_a_shard_modified_after_it_was_saved(mesh: DeviceMesh) -> None:
    shard = torch.randn(4, 4)

    def call(body: Callable[..., Any]) -> None:
        y, _ = inside(
            body, leaf(4, 4), shard, in_types={"x": R, "shard": V}, out_types=V,
            mesh=mesh["model"],
        )  # fmt: skip
        shard.add_(1)
        y.sum().backward()

    version = shard._version
    assert failure(lambda: call(lambda x, s: (x @ s).sin())) == (
        "lowtide: region 'body': expected input 'shard' as it was saved for backward "
        f"(version {version}), got version {version + 1}: it was modified in place "
        f"after aten::matmul at HERE saved it {RANK}. Change a clone, or change it "
        "after backward."
    )
    call(lambda x, s: x + s)  # not saved
