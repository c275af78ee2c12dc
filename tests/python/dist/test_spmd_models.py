"""Regions on gloo: a parallel block against the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from lowtide import spmd
from lowtide.spmd import I, P, R, V

WIDTH = 8


def weights() -> tuple[torch.Tensor, ...]:
    """x, up, gate, down and the norm's scale, whole, in fp64."""
    torch.manual_seed(0)
    shapes = ((4, WIDTH), (WIDTH, 16), (WIDTH, 16), (16, WIDTH), (WIDTH,))
    return tuple(torch.randn(*shape, dtype=torch.float64) for shape in shapes)


def whole(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of the unsharded block."""
    x, up, gate, down, scale = leaves = [t.clone().requires_grad_() for t in tensors]
    h = F.rms_norm(x, (WIDTH,)) * scale
    y = x + (F.silu(h @ gate) * (h @ up)) @ down
    y.pow(2).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def sharded_block() -> tuple[list[torch.Tensor], dict[str, int]]:
    """Sequence-parallel: x, y in shards of tokens, weights in columns and rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rank, size = dist.get_rank(), dist.get_world_size()
    x, up, gate, down, scale = weights()
    shards = [
        x.chunk(size, 0)[rank],
        up.chunk(size, 1)[rank],
        gate.chunk(size, 1)[rank],
        down.chunk(size, 0)[rank],
        scale,
    ]
    leaves = [shard.clone().requires_grad_() for shard in shards]
    with (
        spmd.compare_replicas(),
        spmd.region("block", [V, V, V, V, I], V, mesh=mesh) as run,
    ):
        x, up, gate, down, scale = run.inputs(*leaves)
        scale = spmd.convert(scale, "tp", src=I, dst=R)
        h = spmd.all_gather(F.rms_norm(x, (WIDTH,)) * scale, "tp")
        part = (F.silu(h @ gate) * (h @ up)) @ down
        part = spmd.reinterpret(part, "tp", src=V, dst=P)
        y = run.outputs(x + spmd.reduce_scatter(part, "tp"))
    y.pow(2).sum().backward()
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [y.detach(), *grads], {kind: n for kind, (n, _) in run.sent.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sequence_parallel_block_equals_the_whole(pool_of: Any, size: int) -> None:
    seen = pool_of(size).run(sharded_block)
    expected = whole(*weights())
    sends = {"all-reduce": 1, "reduce-scatter": 1, "all-gather": 1}
    for rank, (tensors, sent) in enumerate(seen):
        # One rank alone sends nothing for an all-reduce.
        assert size == 1 or sent == sends
        for dim, mine, all_of_it in zip(
            (0, 0, 1, 1, 0, None), tensors, expected, strict=True
        ):
            if dim is not None:
                all_of_it = all_of_it.chunk(size, dim)[rank]
            torch.testing.assert_close(mine, all_of_it, rtol=1e-12, atol=1e-12)


def sends_in_backward(below: bool) -> tuple[str, dict[str, Any]]:
    """What a hidden all-reduce, through the group or its backend object, does to a
    region."""
    from support.spmd import function

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        if below:
            group._get_backend(torch.device("cpu")).allreduce([total]).wait()
        else:
            group.allreduce([total]).wait()
        return total

    hidden = function(lambda x: x * 2, backward)
    spmd.register_rule(hidden, spmd.LOCAL)
    with spmd.region("body", R, R, mesh=mesh) as run:
        y = run.outputs(hidden.apply(*run.inputs(torch.ones(4, requires_grad=True))))
    try:
        y.sum().backward()
    except spmd.ReplicationError as error:
        return str(error), run.sent
    return "", run.sent


def test_calls_on_a_group_are_counted_and_those_on_gloo_itself_are_not(
    pool_of: Any,
) -> None:
    for text, sent in pool_of(2).run(sends_in_backward, False):
        assert "expected no all-reduce over 'tp' here in backward" in text
        assert sent == {"all-reduce": (1, 16)}
    assert pool_of(2).run(sends_in_backward, True) == [("", {}), ("", {})]
