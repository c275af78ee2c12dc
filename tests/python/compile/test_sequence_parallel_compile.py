"""A sequence-parallel block under torch.compile(fullgraph=True): the forward saves the
shard, not the gathered tensor, and gradients are those of the block that saves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx

import lowtide
from lowtide._gather.axes import axis_of
from support.ranks import RankPool

ROWS, FEATURES, HIDDEN, WORLD = 5, 16, 24, 2
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, regather: bool | None) -> None:
        super().__init__()
        assert dist.group.WORLD is not None
        self.norm = nn.RMSNorm(FEATURES)
        self.up = lowtide.sequence_parallel.ColumnParallelLinear(
            FEATURES,
            (HIDDEN, HIDDEN),
            bias=True,
            group=dist.group.WORLD,
            name="ffn_in",
            regather=regather,
        )
        self.down = lowtide.sequence_parallel.RowParallelLinear(
            HIDDEN, FEATURES, group=dist.group.WORLD
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x))
        return x + self.down(F.silu(gate) * up)


def block(regather: bool | None) -> Block:
    torch.manual_seed(dist.get_rank())
    return Block(regather)


def shard() -> Tensor:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    return torch.randn(ROWS, FEATURES, generator=generator).requires_grad_()


def gradients(call: Any, module: Block) -> list[Tensor]:
    x = shard()
    (call(x * 1) ** 2).sum().backward()
    result = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    assert all(gradient is not None for gradient in result)
    return [gradient.clone() for gradient in result if gradient is not None]


def compiled(backend: str, regather: bool | None) -> dict[str, Any]:
    """Shapes the compiled forward hands to backward, and whether bits are equal."""
    torch._dynamo.reset()
    torch._inductor.config.force_disable_caches = True
    module = block(regather)
    expected = gradients(module, module)
    if backend == "inductor":
        # Its own kernels round differently from eager's.
        plain = block(False)
        whole = torch.compile(plain, backend="inductor", fullgraph=True)
        expected = gradients(whole, plain)
    saved: list[tuple[int, ...]] = []

    def record(graph: Any, inputs: Any) -> Any:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        for node in output.args[0][1:]:
            value = node.meta.get("val") if hasattr(node, "meta") else None
            if isinstance(value, Tensor):
                saved.append(tuple(value.shape))
        return graph.forward

    choices = {
        "eager": "eager",
        "aot_eager": aot_autograd(fw_compiler=record),
        "inductor": "inductor",
    }
    if backend == "inductor":

        def inner(graph: Any, inputs: Any, **kwargs: Any) -> Any:
            from torch._inductor.compile_fx import compile_fx_inner

            if not kwargs.get("is_backward"):
                record(graph, inputs)
            return compile_fx_inner(graph, inputs, **kwargs)

        choices["inductor"] = lambda graph, inputs: compile_fx(
            graph, inputs, inner_compile=inner
        )
    call = torch.compile(module, backend=choices[backend], fullgraph=True)
    axis_of(dist.group.WORLD, CPU).reset_figures()
    got = gradients(call, module)
    return {
        "saved": saved,
        "equal": [torch.equal(a, b) for a, b in zip(got, expected, strict=True)],
        "figures": axis_of(dist.group.WORLD, CPU).figures()["ffn_in"],
    }


@pytest.fixture(scope="module")
def pool() -> Any:
    with RankPool(WORLD) as ranks:
        yield ranks


@pytest.mark.timeout(600)  # C++ compilers run, twice on each rank
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_compiled_forward_saves_the_shard(pool: RankPool, backend: str) -> None:
    gathered = (WORLD * ROWS, FEATURES)
    for seen in pool.run(compiled, backend, True, timeout=560):
        assert seen["figures"]["gathers"] == 1
        assert seen["figures"]["regathers"] == 1
        assert all(seen["equal"]), seen
        if backend != "eager":
            assert gathered not in seen["saved"], seen
            assert (ROWS, FEATURES) in seen["saved"], seen


def test_without_regather_it_saves_the_gathered_tensor(pool: RankPool) -> None:
    for seen in pool.run(compiled, "aot_eager", False, timeout=280):
        assert seen["figures"]["regathers"] == 0
        assert all(seen["equal"])
        assert (WORLD * ROWS, FEATURES) in seen["saved"]


def under_a_policy() -> list[int]:
    """A policy around compiled code decides when it is traced, and again when it
    changes."""
    torch._dynamo.reset()
    module = block(None)
    call = torch.compile(module, backend="aot_eager", fullgraph=True)
    counts = []
    for names in (["ffn_in"], ["ffn_in"], []):
        axis_of(dist.group.WORLD, CPU).reset_figures()
        with lowtide.sequence_parallel.gather_policy(regather=names, min_bytes=0):
            loss = (call(shard()) ** 2).sum()
        loss.backward()
        counts.append(axis_of(dist.group.WORLD, CPU).figures()["ffn_in"]["regathers"])
    return counts


def test_a_policy_decides_for_compiled_code(pool: RankPool) -> None:
    for counts in pool.run(under_a_policy, timeout=280):
        assert counts == [1, 1, 0]


def gathers_generically() -> list[str]:
    torch._dynamo.reset()

    def forward(x: Tensor, regather: bool | None) -> Tensor:
        y = lowtide.sequence_parallel.sp_all_gather(
            x, dist.group.WORLD, "x", regather=regather
        )
        return lowtide.sequence_parallel.sp_reduce_scatter(y.sin(), dist.group.WORLD)

    call = torch.compile(forward, backend="aot_eager", fullgraph=True)
    x, same = shard(), shard()
    (call(x, None) ** 2).sum().backward()
    (forward(same, None) ** 2).sum().backward()
    assert torch.equal(x.grad, same.grad)
    try:
        call(shard(), True)
    except Exception as error:
        return str(error).splitlines()
    return []


def test_a_generic_gather_is_refused_where_it_would_be_done_again(
    pool: RankPool,
) -> None:
    for lines in pool.run(gathers_generically, timeout=280):
        text = "\n".join(lines)
        assert "lowtide: sp_all_gather 'x': expected eager code" in text, text
        assert "Use sp_gather_linear, or pass regather=False." in text
