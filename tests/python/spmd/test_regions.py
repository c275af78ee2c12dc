"""Regions on a fake 4 x 2 mesh: types inferred, what backward sends counted."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from lowtide import spmd
from lowtide.spmd import I, P, R, V
from support.spmd import failure, inside, leaf


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
