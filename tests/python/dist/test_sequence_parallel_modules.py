"""Parallel linear layers beside the whole ones, refusals, and sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from support.sequence_parallel import (
    FEATURES,
    group,
    naive_all_gather,
    naive_reduce_scatter,
    same,
    shard_of,
)


def modules_against_one_process() -> dict[str, Any]:
    """The whole layer's rows and columns, split over the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    full_up = [torch.randn(8, FEATURES, generator=generator) for _ in range(2)]
    full_down = torch.randn(FEATURES, 8, generator=generator)
    bias = torch.randn(FEATURES, generator=generator)
    up = lowtide.sequence_parallel.ColumnParallelLinear(
        FEATURES, (8, 8), group=group(), name="ffn_in", regather=True
    )
    down = lowtide.sequence_parallel.RowParallelLinear(
        8, FEATURES, bias=True, group=group()
    )
    with torch.no_grad():
        for weight, full in zip(up.weights, full_up, strict=True):
            weight.copy_(full.chunk(size)[rank])
        down.weight.copy_(full_down.chunk(size, 1)[rank])
        down.bias.copy_(bias.chunk(size)[rank])
    shards = [shard_of(r) for r in range(size)]
    gate, value = up(shards[rank])
    out = down(F.silu(gate) * value)
    (out**2).sum().backward()

    whole = torch.cat([s.detach() for s in shards]).requires_grad_()
    parameters = [t.requires_grad_() for t in (*full_up, full_down, bias)]
    expected = F.linear(
        F.silu(whole @ full_up[0].t()) * (whole @ full_up[1].t()), full_down, bias
    )
    (expected**2).sum().backward()
    close = [
        torch.allclose(out, expected.chunk(size)[rank], atol=1e-4),
        torch.allclose(shards[rank].grad, whole.grad.chunk(size)[rank], atol=1e-3),
    ]
    for mine, full, dim in (
        (up.weights[0], parameters[0], 0),
        (up.weights[1], parameters[1], 0),
        (down.weight, parameters[2], 1),
        (down.bias, parameters[3], 0),
    ):
        part = full.grad.chunk(size, dim)[rank]
        close.append(torch.allclose(mine.grad, part, atol=1e-3, rtol=1e-4))
    return {"close": close, "text": repr(up)}


@pytest.mark.parametrize("world", [2, 4])
def test_modules_are_the_whole_layer(pool_of, world):
    for seen in pool_of(world).run(modules_against_one_process):
        assert all(seen["close"]), seen
        assert f"8, [8, 8] over {world} ranks, name='ffn_in'" in seen["text"]


def refusals() -> list[str]:
    from torch.distributed.tensor import Shard

    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp")
    )
    x = shard_of(0)
    tensor = dist.tensor.DTensor.from_local(x, mesh["tp"], (Shard(0),))
    texts = []
    for call in (
        lambda: lowtide.sequence_parallel.sp_all_gather(x, mesh, "x"),
        lambda: lowtide.sequence_parallel.sp_all_gather(tensor, mesh["tp"], "x"),
        lambda: lowtide.sequence_parallel.sp_all_gather(x.sum(), mesh["tp"], "x"),
        lambda: lowtide.sequence_parallel.sp_gather_linear(
            x, [], group=mesh["tp"], name="x"
        ),
        lambda: lowtide.sequence_parallel.sp_gather_linear(
            x, [x.t()], group=mesh["tp"], name="x"
        ),
        lambda: lowtide.sequence_parallel.sp_gather_linear(
            x, [tensor], group=mesh["tp"], name="x"
        ),
        lambda: lowtide.sequence_parallel.ColumnParallelLinear(
            8, 7, group=mesh["tp"], name="x"
        ),
        lambda: lowtide.sequence_parallel.RowParallelLinear(7, 8, group=mesh["tp"]),
        lambda: lowtide.sequence_parallel.RowParallelLinear(8, 7, group=mesh["tp"]),
        lambda: lowtide.sequence_parallel.gather_policy(min_bytes=-1),
        lambda: lowtide.sequence_parallel.gather_policy(regather="attn_in"),
    ):
        try:
            call()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_refusals(pool_of):
    texts = pool_of(2).run(refusals)[0]
    assert texts == [
        "lowtide: sp_all_gather 'x': expected a process group or a 1-D mesh, got a "
        "mesh of 2 dimensions ('dp', 'tp'). Pass one axis: mesh['tp'].",
        "lowtide: sp_all_gather 'x': expected this rank's part as a plain tensor, got "
        "a DTensor. Pass x.to_local(), or use "
        "lowtide.sequence_parallel.rematerialize_gathers on the parallelised model.",
        "lowtide: sp_all_gather 'x': expected a tensor with a dim 0 to gather along, "
        "got a scalar. Reshape it to [1].",
        "lowtide: sp_gather_linear 'x': expected at least one weight and a bias or "
        "None for each, got 0 weights and 0 biases. Pass lists of equal length.",
        "lowtide: sp_gather_linear 'x': expected weights [outputs, features] and a "
        "shard [rows, ..., features], got (8, 6) and (6, 8). Transpose or reshape "
        "them.",
        "lowtide: sp_gather_linear 'x': expected weights that are plain tensors, got a "
        "DTensor. Pass weight.to_local(), inside the module that fully_shard gathers "
        "for.",
        "lowtide: ColumnParallelLinear 'x': expected out_features that the group's "
        "size 2 divides, got 7. Pad the layer, or choose another group.",
        "lowtide: RowParallelLinear: expected in_features that the group's size 2 "
        "divides, got 7. Pad the layer, or choose another group.",
        "",  # as many out_features as you like
        "lowtide: gather_policy.min_bytes: expected an integer >= 0, got -1. Leave it "
        "out for the default.",
        "lowtide: gather_policy.regather: expected a list of names or 'all', got "
        "'attn_in'. Write regather=['attn_in'].",
    ]


# -- with fully_shard ---------------------------------------------------------------


class Mlp(nn.Module):
    """Two weights behind one gather, one before a reduce-scatter."""

    def __init__(self, tp: Any, naive: bool) -> None:
        super().__init__()
        self.tp, self.naive = tp, naive
        seed = 3 + dist.get_rank(tp.get_group())
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(8, FEATURES, generator=generator))
        self.gate = nn.Parameter(torch.randn(8, FEATURES, generator=generator))
        self.down = nn.Parameter(torch.randn(FEATURES, 8, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        tp = self.tp.get_group()
        if self.naive:
            whole = naive_all_gather(x, tp)
            up, gate = F.linear(whole, self.up), F.linear(whole, self.gate)
            return naive_reduce_scatter(F.linear(up * gate.sin(), self.down), tp)
        up, gate = lowtide.sequence_parallel.sp_gather_linear(
            x, [self.up, self.gate], group=self.tp, name="in", regather=True
        )
        return lowtide.sequence_parallel.sp_reduce_scatter(
            F.linear(up * gate.sin(), self.down), tp
        )


def train_on_two_axes(naive: bool) -> dict[str, Any]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*[Mlp(mesh["tp"], naive) for _ in range(2)])
    for block in model:
        lowtide.fully_shard(block, mesh=mesh["dp"])
    lowtide.fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, gradients = [], []
    for step in range(3):
        for last in (False, True):  # accumulated, then reduced
            model.set_requires_gradient_sync(last)
            x = shard_of(dist.get_rank(), seed=2 * step + last) * 0.1
            loss = (model(x) ** 2).sum()
            loss.backward()
        losses.append(loss.detach())
        gradients += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def test_gradients_reach_the_flat_slices_of_fully_shard(pool_of):
    ours = pool_of(4).run(train_on_two_axes, False)
    naive = pool_of(4).run(train_on_two_axes, True)
    for a, b in zip(ours, naive, strict=True):
        assert all(same(a["losses"], b["losses"]))
        assert all(same(a["gradients"], b["gradients"]))
