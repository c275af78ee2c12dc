"""Regions beside what they do not go with: compiled graphs and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

import lowtide
from lowtide import spmd
from lowtide.spmd import I, R, V
from support.spmd import inside, leaf, message


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def body(x: torch.Tensor) -> torch.Tensor:
    x = spmd.convert(x, "model", src=I, dst=R)
    return F.gelu(x * 2, approximate="tanh")


def model_with(kind: str, mesh: DeviceMesh) -> tuple[Callable[..., Any], list[Any]]:
    """A region between two operators, and what its backwards sent."""
    axis, runs = mesh["model"], []
    decorated = spmd.region("r", [I], R, mesh=axis)(body)

    def as_decorator(x: torch.Tensor) -> torch.Tensor:
        return decorated(x.sin()).cos() * 3

    def as_context(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        with spmd.region("r", [I], R, mesh=axis) as run:
            (x,) = run.inputs(x)
            y = run.outputs(body(x))
        runs.append(run)
        return y.cos() * 3

    choices = {"decorator": as_decorator, "context": as_context}
    return choices[kind], runs


@pytest.mark.parametrize("kind", ["decorator", "context"])
def test_compiled_code_runs_a_region_as_it_is(mesh: DeviceMesh, kind: str) -> None:
    model, runs = model_with(kind, mesh)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        x, same = (torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2))
        y, expected = compiled(x), model(same)
        y.sum().backward()
        expected.sum().backward()
        assert torch.equal(y, expected) and torch.equal(x.grad, same.grad)
    assert [run.sent for run in runs] == [{"all-reduce": (1, 16)}] * len(runs)
    # Around a decorated function both sides are compiled.
    assert counters["stats"]["unique_graphs"] == (2 if kind == "decorator" else 0)


@pytest.mark.parametrize("kind", ["decorator", "context"])
def test_a_full_graph_is_refused_with_the_reason(mesh: DeviceMesh, kind: str) -> None:
    model, _ = model_with(kind, mesh)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="regions of lowtide.spmd are for eager code"):
        compiled(leaf(4))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_sequence_parallel_calls_are_refused_inside(
    mesh: DeviceMesh, model: dist.ProcessGroup, check: bool
) -> None:
    weight = torch.randn(3, 4)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "sp_all_gather 'x'": lambda x: lowtide.sequence_parallel.sp_all_gather(
            x, model, "x"
        ),
        "sp_reduce_scatter": lambda x: lowtide.sequence_parallel.sp_reduce_scatter(
            x, model
        ),
        "sp_gather_linear 'x'": lambda x: lowtide.sequence_parallel.sp_gather_linear(
            x, [weight], group=model, name="x"
        ),
    }
    declared = {} if check else {"check": False, "grad_types": V}
    for who, call in calls.items():
        text = message(
            lambda call=call: inside(
                call, leaf(4, 4), in_types=V, out_types=V, mesh=mesh["model"],
                **declared,
            ),
            RuntimeError,
        )  # fmt: skip
        assert text == (
            f"lowtide: {who}: expected a call outside of the regions of lowtide.spmd, "
            "got one inside region 'body'. Use the typed collectives of lowtide.spmd "
            "there, or end the region before the layer."
        )
