"""Collectives that the types do not require, those they do, and shards that change
before backward needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from lowtide import spmd
from lowtide.spmd import COLLECTIVE, LOCAL, P, R, V
from support.spmd import RANK, failure, function, inside, leaf, reduced


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
