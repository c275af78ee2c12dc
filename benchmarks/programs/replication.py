"""Case 4 on every rank of a 4 x 2 mesh: an opaque kernel inside a region."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from lowtide import spmd

SHAPE = (1, 128)
FEW, MANY, TIMES = 2, 34, 200
Seen = dict[str, Any]


def kernel(
    name: str,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Any:
    """A custom operator that torch does not look into."""

    @torch.library.custom_op(f"case4::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return forward(x)

    op.register_autograd(
        lambda ctx, gradient: backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


def slope(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gradient * (1 - torch.tanh(x) ** 2)


def place(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank("model")


def inputs(mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """x, equal along "model", and what comes back for it: each rank's own part."""
    torch.manual_seed(mesh.get_local_rank("data"))
    x = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    part = torch.randn(2, *SHAPE, dtype=torch.bfloat16)[place(mesh)]
    return x, part


def in_region(op: Any, mesh: DeviceMesh) -> Seen:
    """What a region around `op` says and counts; V along "data", R along "model"."""
    types = {"data": spmd.V, "model": spmd.R}
    x, part = inputs(mesh)
    expected = slope(part, x.detach())
    seen: Seen = {"message": "", "sent": {}, "right": False}
    try:
        with spmd.region("kernel", types, types, mesh=mesh) as run:
            (inside,) = run.inputs(x)
            y = run.outputs(op(inside))
        y.backward(part)
        assert x.grad is not None
        seen["right"] = torch.equal(x.grad, expected)
    except spmd.ReplicationError as error:
        seen["message"] = str(error)
    seen["sent"] = run.sent
    return seen


def seen_by_modes(op: Any, mesh: DeviceMesh) -> int:
    """Collectives that torch's CommDebugMode around forward counts."""
    x, part = inputs(mesh)
    with CommDebugMode() as mode:
        y = op(x)
    y.backward(part)
    return mode.get_total_counts()


def on_rank() -> dict[str, Seen]:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model"))
    group = mesh.get_group("model")

    def reduce(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return slope(gradient / 2, x)

    opaque = kernel("kernel", torch.tanh, slope)
    reduces = kernel("reduces", torch.tanh, reduce)
    differs = kernel("differs", lambda x: torch.tanh(x) + place(mesh), slope)
    result = {"no rule": in_region(opaque, mesh)}
    for op in (opaque, reduces, differs):
        spmd.register_rule(op, spmd.LOCAL)
    result["LOCAL"] = in_region(opaque, mesh)
    result["LOCAL, but backward reduces"] = in_region(reduces, mesh)
    result["LOCAL, but backward reduces"]["modes"] = seen_by_modes(reduces, mesh)
    result["LOCAL, but ranks differ"] = in_region(differs, mesh)
    with spmd.compare_replicas():
        result["the same, replicas compared"] = in_region(differs, mesh)
        result["LOCAL, replicas compared"] = in_region(opaque, mesh)
    return result


def cost() -> dict[str, tuple[float, float]]:
    """CPU microseconds that a region adds to forward and backward of small operators:
    (for itself and the first two, for each further one); of medians."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model"))
    x = torch.randn(4, requires_grad=True)
    grad_types = {"data": spmd.P, "model": spmd.P}
    medians = {}
    for operators in (FEW, MANY):

        def body(x: torch.Tensor, operators: int = operators) -> torch.Tensor:
            for _ in range(operators // 2):
                x = torch.tanh(x) * 2
            return x

        region, R = spmd.region, spmd.R
        ways = {
            "plain": body,
            "checked": region("body", {"x": R}, R, mesh=mesh)(body),
            "unchecked": region(
                "body", {"x": R}, R, [grad_types], mesh=mesh, check=False
            )(body),
        }
        for name, median in in_turns(x, ways).items():
            medians[name, operators] = median
    return {
        name: (
            medians[name, FEW] - medians["plain", FEW],
            (medians[name, MANY] - medians["plain", MANY]) / (MANY - FEW)
            - (medians[name, FEW] - medians["plain", FEW]) / (MANY - FEW),
        )
        for name in ("checked", "unchecked")
    }


def in_turns(x: torch.Tensor, ways: dict[str, Any]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TIMES):
        for name, way in ways.items():
            start = time.process_time()
            way(x).sum().backward()
            times[name].append(1e6 * (time.process_time() - start))
    return {name: sorted(each)[TIMES // 2] for name, each in times.items()}
