"""Gathers done again in backward: the bits of torch's own, one collective a site."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._state.gather_axes import axis_of
from lowtide._state.memory import ledger
from support.sequence_parallel import (
    FEATURES,
    ROWS,
    consumers,
    naive_all_gather,
    naive_reduce_scatter,
    shard_of,
    weights_of,
)

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = (8, 4, 4)
EVERYTHING: dict[str, Any] = {"regather": "all", "min_bytes": 0}


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def figures(name: str) -> dict[str, int]:
    return axis_of(group(), CPU).figures()[name]


@contextlib.contextmanager
def fresh_figures() -> Iterator[None]:
    axis_of(group(), CPU).reset_figures()
    yield
    assert settles(lambda: ledger(CPU).live()["activations"] == 0)


def settles(condition: Callable[[], bool]) -> bool:
    """gloo's worker holds the tensors of a collective a little longer than we do."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def grads(*tensors: Tensor) -> list[Tensor]:
    taken = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    assert all(grad is not None for grad in taken)
    return taken  # type: ignore[return-value]


def same(got: list[Tensor], expected: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]


# -- the same bits ------------------------------------------------------------------


def linears_against_naive(dtype: str, regather: bool, addmm: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank, DTYPES[dtype]), weights_of(SIZES, rank)
    weights = [w.detach().to(DTYPES[dtype]).requires_grad_() for w in weights]
    bias = torch.arange(4.0).to(DTYPES[dtype]).requires_grad_()
    biases = [None, bias, None]
    with fresh_figures():
        outputs = lowtide.sp_gather_linear(
            shard * 1,
            weights,
            biases,
            group=group(),
            name="qkv",
            regather=regather,
            addmm=addmm,
        )
        sum((y.float() ** 2).sum() for y in outputs).backward()
    ours = grads(shard, *weights, bias)
    whole = naive_all_gather(shard * 1, group())
    expected = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    sum((y.float() ** 2).sum() for y in expected).backward()
    theirs = grads(shard, *weights, bias)
    return {
        "outputs": same(list(outputs), expected),
        "gradients": same(ours, theirs),
        "close": torch.allclose(ours[0].float(), theirs[0].float(), rtol=0.02),
        "figures": figures("qkv"),
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("regather", [True, False])
def test_linears_have_the_bits_of_separate_layers(pool_of, world, dtype, regather):
    for seen in pool_of(world).run(linears_against_naive, dtype, regather, False):
        assert all(seen["outputs"]) and all(seen["gradients"])
        assert seen["figures"] == {
            "gathers": 1,
            "regathers": int(regather),
            "prefetched": 0,
            "unused": 0,
            "shadowed": 0,
        }


def test_addmm_changes_only_the_shards_gradient(pool_of):
    for seen in pool_of(2).run(linears_against_naive, "bf16", True, True):
        assert all(seen["gradients"][1:]) and seen["close"]


def generic_against_naive(dtype: str) -> dict[str, Any]:
    rank = dist.get_rank()
    shard = shard_of(rank, DTYPES[dtype])
    weights = weights_of((8,), rank, DTYPES[dtype])
    with fresh_figures():
        with lowtide.gather_policy(**EVERYTHING):
            x = lowtide.sp_all_gather(shard * 1, group(), "x")
            loss = consumers(x, weights)
            del x
        loss.backward()
    ours = grads(shard, *weights)
    expected = consumers(naive_all_gather(shard * 1, group()), weights)
    expected.backward()
    return {
        "loss": torch.equal(loss, expected),
        "gradients": same(ours, grads(shard, *weights)),
        "regathers": figures("x")["regathers"],
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_consumer_shares_one_gather(pool_of, world, dtype):
    for seen in pool_of(world).run(generic_against_naive, dtype):
        assert seen["loss"] and all(seen["gradients"])
        assert seen["regathers"] == 1


def autocast_against_naive() -> list[bool]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of(SIZES, rank)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = lowtide.sp_gather_linear(
            shard * 1, weights, group=group(), name="auto", regather=True
        )
        sum((y.float() ** 2).sum() for y in outputs).backward()
    ours = grads(shard, *weights)
    with torch.autocast("cpu", torch.bfloat16):
        whole = naive_all_gather(shard * 1, group())
        expected = [F.linear(whole, w) for w in weights]
        sum((y.float() ** 2).sum() for y in expected).backward()
    dtypes = [y.dtype is torch.bfloat16 for y in outputs]
    return dtypes + same(ours, grads(shard, *weights))


def test_autocast(pool_of):
    for seen in pool_of(2).run(autocast_against_naive):
        assert all(seen)


# -- what is held -------------------------------------------------------------------


def saved_bytes(regather: bool) -> int:
    """Live bytes between forward and backward, beyond those before."""
    from lowtide import _C

    shard = shard_of(dist.get_rank(), rows=512)
    weights = weights_of((1,), 0)
    timeline = _C.AllocationTimeline(CPU, ledger(CPU))
    with timeline:
        (y,) = lowtide.sp_gather_linear(
            shard * 1, weights, group=group(), name="big", regather=regather
        )
        loss = y.sum()
        del y
        live = min(sampled(timeline) for _ in range(40))
    loss.backward()
    return live


def sampled(timeline: Any) -> int:
    time.sleep(0.01)  # gloo's worker, as above
    torch.empty(1)
    return timeline.samples()["total"][-1]


@pytest.mark.parametrize("world", [2, 4])
def test_a_site_holds_its_shard_instead_of_the_gathered_value(pool_of, world):
    shard = 512 * FEATURES * 4
    kept = pool_of(world).run(saved_bytes, False)
    again = pool_of(world).run(saved_bytes, True)
    for before, after in zip(kept, again, strict=True):
        # To a KiB: gloo's worker may still hold a digest of the first step.
        assert abs(before - after - (world - 1) * shard) < 1024


# -- backwards of every kind --------------------------------------------------------


def two_sites(shard: Tensor, weights: list[Tensor]) -> Tensor:
    with lowtide.gather_policy(**EVERYTHING):
        x = lowtide.sp_all_gather(shard * 1, group(), "first")
        hidden = lowtide.sp_reduce_scatter(F.linear(x, weights[0]).sin(), group())
        (y,) = lowtide.sp_gather_linear(
            hidden, weights[1:], group=group(), name="second"
        )
    return (y**2).sum()


def kinds_of_backward() -> dict[str, Any]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8, 4), rank)
    seen: dict[str, Any] = {}
    with fresh_figures():
        loss = two_sites(shard, weights)
        loss.backward(retain_graph=True)
        first = grads(shard, *weights)
        loss.backward()
        seen["retained"] = same(grads(shard, *weights), first)
        seen["twice"] = [figures(n)["regathers"] for n in ("first", "second")]
    with fresh_figures():
        loss = two_sites(shard, weights)
        (partial,) = torch.autograd.grad(loss, [weights[1]])
        seen["partial"] = torch.equal(partial, first[2])
        seen["partly"] = [figures("second")["regathers"]]
        seen["partly"].append(figures("first")["regathers"])
    with fresh_figures():
        for _ in range(2):
            two_sites(shard, weights).backward()
        doubled = grads(shard, *weights)
        seen["accumulated"] = same(doubled, [g * 2 for g in first])
        seen["prefetched"] = figures("first")["prefetched"]
    with fresh_figures():
        losses = [two_sites(shard, weights) for _ in range(2)]
        sum(losses).backward()
        seen["together"] = same(grads(shard, *weights), doubled)
        seen["both"] = [figures(n)["regathers"] for n in ("first", "second")]
    with fresh_figures(), torch.no_grad():
        two_sites(shard, weights)
        seen["inference"] = figures("first")["regathers"]
    return seen


def test_every_kind_of_backward(pool_of):
    for seen in pool_of(2).run(kinds_of_backward):
        assert all(seen["retained"]) and seen["twice"] == [2, 2]
        assert seen["partial"] and seen["partly"] == [1, 0]
        assert all(seen["accumulated"]) and seen["prefetched"] == 2
        assert all(seen["together"]) and seen["both"] == [2, 2]
        assert seen["inference"] == 0


class Bomb(torch.autograd.Function):
    armed = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Bomb.armed:
            raise ArithmeticError("on purpose")
        return gradient


def survives_an_exception() -> list[bool]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8, 4), rank)
    two_sites(shard, weights).backward()
    expected = grads(shard, *weights)
    Bomb.armed = True
    with fresh_figures():
        with pytest.raises(ArithmeticError):
            two_sites(Bomb.apply(shard), weights).backward()
    with fresh_figures(), pytest.raises(ArithmeticError), lowtide.gather_policy():
        raise ArithmeticError
    for tensor in (shard, *weights):
        tensor.grad = None
    two_sites(shard, weights).backward()
    return same(grads(shard, *weights), expected)


def test_training_goes_on_after_an_exception(pool_of):
    for seen in pool_of(2).run(survives_an_exception):
        assert all(seen)


# -- checkpoints --------------------------------------------------------------------


def in_a_checkpoint(kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8, 4), rank)
    two_sites(shard, weights).backward()
    expected = grads(shard, *weights)

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return two_sites(x, weights)

    with fresh_figures():
        if kind == "lowtide":
            loss = lowtide.checkpoint(Block())(shard * 1)
        else:
            loss = checkpoint(Block(), shard * 1, use_reentrant=kind == "reentrant")
        before = {n: figures(n)["gathers"] for n in ("first", "second")}
        loss.backward()
        return {
            "gradients": same(grads(shard, *weights), expected),
            "in backward": [
                figures(n)["gathers"] - before[n] + figures(n)["regathers"]
                for n in ("first", "second")
            ],
            "shadowed": figures("first")["shadowed"],
        }


@pytest.mark.parametrize("kind", ["torch", "lowtide", "reentrant"])
def test_a_checkpoint_gathers_once_in_backward(pool_of, kind):
    for seen in pool_of(2).run(in_a_checkpoint, kind):
        assert all(seen["gradients"])
        assert seen["in backward"] == [1, 1]
        assert kind == "reentrant" or seen["shadowed"] > 0


# -- what user code may do ----------------------------------------------------------


def escapes() -> dict[str, Any]:
    shard, weights = shard_of(dist.get_rank()), weights_of((8,), 0)
    with fresh_figures():
        with lowtide.gather_policy(**EVERYTHING):
            x = lowtide.sp_all_gather(shard * 1, group(), "x")
            y = F.linear(x, weights[0])
        text = ""
        try:
            assert y.grad_fn._saved_self is not None
        except RuntimeError as error:
            text = str(error)
        gathers = figures("x")["regathers"]
        kept = x.detach().clone()
        (y**2).sum().backward()
        return {
            "text": text,
            "gathers": gathers,
            "regathers": figures("x")["regathers"],
            "kept": torch.equal(x, kept),
        }


def test_a_saved_tensor_read_outside_backward_issues_no_collective(pool_of):
    for rank, seen in enumerate(pool_of(2).run(escapes)):
        assert seen["text"] == (
            "lowtide: sequence-parallel gather 'x': expected its saved value to be "
            "read inside backward, which gathers it again, got a read outside of it "
            f"(rank {rank} of 2). Read a tensor of your own, or keep this one with "
            "regather=False."
        )
        assert seen["gathers"] == 0
        # Whether a rank still holds the value must not decide about a collective.
        assert seen["regathers"] == 1 and seen["kept"]


def writes_in_place() -> list[str]:
    texts = []
    for what in ("shard", "gathered", "before", "linear"):
        shard = shard_of(dist.get_rank()) * 1
        weights = weights_of((8,), 0)
        try:
            with lowtide.gather_policy(**EVERYTHING):
                if what == "linear":
                    (y,) = lowtide.sp_gather_linear(
                        shard, weights, group=group(), name="x"
                    )
                else:
                    x = lowtide.sp_all_gather(shard, group(), "x")
                    if what == "before":
                        x = x.mul_(2)
                    y = F.linear(x, weights[0])
            with torch.no_grad():
                (x if what == "gathered" else shard).mul_(2)
            y.sum().backward()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_a_write_in_place_names_the_site_and_the_tensor(pool_of):
    for rank, texts in enumerate(pool_of(2).run(writes_in_place)):
        shard, gathered, before, linear = texts
        assert (
            shard
            == linear
            == (
                "lowtide: sequence-parallel gather 'x': expected the shard at version "
                "0, as it was gathered, got version 1: something wrote to it in place "
                f"(rank {rank} of 2). Write out of place: backward gathers the shard "
                "again."
            )
        )
        assert (
            gathered
            == before
            == (
                "lowtide: sequence-parallel gather 'x': expected the gathered tensor "
                "at version 0, as it was gathered, got version 1: something wrote to "
                f"it in place (rank {rank} of 2). Write out of place: backward needs "
                "the value."
            )
        )


# -- policies -----------------------------------------------------------------------


def decided(**policy: Any) -> dict[str, int]:
    """Which of the sites were gathered again."""
    rank = dist.get_rank()
    shard, weights = shard_of(rank), weights_of((8,), rank)
    with fresh_figures():
        with lowtide.gather_policy(**policy):
            outputs = [
                *lowtide.sp_gather_linear(shard, weights, group=group(), name="a"),
                *lowtide.sp_gather_linear(shard, weights, group=group(), name="b"),
                *lowtide.sp_gather_linear(
                    shard, weights, group=group(), name="always", regather=True
                ),
                *lowtide.sp_gather_linear(
                    shard, weights, group=group(), name="never", regather=False
                ),
            ]
        sum(y.sum() for y in outputs).backward()
        names = ("a", "b", "always", "never")
        return {name: figures(name)["regathers"] for name in names}


GATHERED = 2 * ROWS * FEATURES * 4


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ({"regather": "all", "min_bytes": 0}, {"a", "b", "always"}),
        ({"regather": ["b"], "min_bytes": 0}, {"b", "always"}),
        ({"regather": ["b"], "min_bytes": GATHERED}, {"b", "always"}),
        ({"regather": ["b"], "min_bytes": GATHERED + 1}, {"always"}),
        ({}, {"always"}),  # 32 MiB
        ({"regather": ["never"], "min_bytes": 0}, {"always"}),
    ],
    ids=["all", "name", "large enough", "too small", "default", "call decides"],
)
def test_name_and_size_decide_unless_the_call_does(pool_of, policy, again):
    for seen in pool_of(2).run(decided, **policy):
        assert {name for name, count in seen.items() if count} == again


def no_policy() -> dict[str, Any]:
    shard, weights = shard_of(dist.get_rank()), weights_of((8,), 0)
    (y,) = lowtide.sp_gather_linear(shard, weights, group=group(), name="plain")
    y.sum().backward()
    text = ""
    try:
        lowtide.sp_all_gather(shard, group(), "x", regather=True)
    except RuntimeError as error:
        text = str(error)
    unmatched = ""
    try:
        with lowtide.gather_policy(regather=["atn_in"]):
            lowtide.sp_all_gather(shard, group(), "attn_in")
    except ValueError as error:
        unmatched = str(error)
    return {
        "regathers": figures("plain")["regathers"],
        "text": text,
        "unmatched": unmatched,
    }


def test_without_a_policy_nothing_is_gathered_again(pool_of):
    for seen in pool_of(2).run(no_policy):
        assert seen["regathers"] == 0
        assert seen["text"] == (
            "lowtide: sp_all_gather 'x': expected `with lowtide.gather_policy(...):` "
            "around the forward for regather=True, got none: what consumers save could "
            "not be seen. Add it, or use sp_gather_linear."
        )
        assert seen["unmatched"] == (
            "lowtide: gather_policy.regather: expected 'atn_in' to name a gather in "
            "the forward, got none. Did you mean 'attn_in'?"
        )


# -- agreement ----------------------------------------------------------------------


def uneven(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    lowtide.sp_all_gather(shard_of(rank, rows=ROWS + rank), group, "uneven")


def decides_alone(group: dist.ProcessGroup) -> None:
    shard, weights = shard_of(0), weights_of((8,), 0)
    lowtide.sp_gather_linear(
        shard, weights, group=group, name="alone", regather=dist.get_rank() == 0
    )


def orders_differ(group: dist.ProcessGroup) -> None:
    shard, weights = shard_of(0), weights_of((8,), 0)
    loss: Any = 0.0
    for regather in (True, False, dist.get_rank() == 0):
        (y,) = lowtide.sp_gather_linear(
            shard, weights, group=group, name="order", regather=regather
        )
        loss = loss + y.sum()
    loss.backward()


def disagreements() -> list[str]:
    """Each program's message, on a group that is in its first step."""
    texts = []
    for program in (uneven, decides_alone, orders_differ):
        try:
            program(dist.new_group())
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_ranks_that_differ_hear_about_it_in_the_first_step(pool_of):
    again = ", gathered again in backward"
    sides = [
        ("'uneven' Float [6, 8]", "'uneven' Float [7, 8]", "0 of 1"),
        (f"'alone' Float [6, 8]{again}", "'alone' Float [6, 8]", "0 of 1"),
        (f"'order' Float [6, 8]{again}", "'order' Float [6, 8]", "2 of 3"),
    ]
    for rank, texts in enumerate(pool_of(2).run(disagreements)):
        assert texts == [
            "lowtide: sequence-parallel gathers: expected the same shards, names and "
            f"decisions in the same order on every rank, got {zero} on rank 0 and "
            f"{one} on rank 1 (entry {entry}, rank {rank} of 2). Pad the sequence so "
            "that every rank has as many tokens, and run the same program on all ranks."
            for zero, one, entry in sides
        ]


# -- modules ------------------------------------------------------------------------


def modules_against_one_process() -> dict[str, Any]:
    """The whole layer's rows and columns, split over the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    full_up = [torch.randn(8, FEATURES, generator=generator) for _ in range(2)]
    full_down = torch.randn(FEATURES, 8, generator=generator)
    bias = torch.randn(FEATURES, generator=generator)
    up = lowtide.ColumnParallelLinear(
        FEATURES, (8, 8), group=group(), name="ffn_in", regather=True
    )
    down = lowtide.RowParallelLinear(8, FEATURES, bias=True, group=group())
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
        lambda: lowtide.sp_all_gather(x, mesh, "x"),
        lambda: lowtide.sp_all_gather(tensor, mesh["tp"], "x"),
        lambda: lowtide.sp_all_gather(x.sum(), mesh["tp"], "x"),
        lambda: lowtide.sp_gather_linear(x, [], group=mesh["tp"], name="x"),
        lambda: lowtide.sp_gather_linear(x, [x.t()], group=mesh["tp"], name="x"),
        lambda: lowtide.ColumnParallelLinear(8, 7, group=mesh["tp"], name="x"),
        lambda: lowtide.gather_policy(min_bytes=-1),
        lambda: lowtide.gather_policy(regather="attn_in"),
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
        "a DTensor. Pass x.to_local(), or use lowtide.rematerialize_gathers on the "
        "parallelised model.",
        "lowtide: sp_all_gather 'x': expected a tensor with a dim 0 to gather along, "
        "got a scalar. Reshape it to [1].",
        "lowtide: sp_gather_linear 'x': expected at least one weight and a bias or "
        "None for each, got 0 weights and 0 biases. Pass lists of equal length.",
        "lowtide: sp_gather_linear 'x': expected weights [outputs, features] and a "
        "shard [rows, ..., features], got (8, 6) and (6, 8). Transpose or reshape "
        "them.",
        "lowtide: ColumnParallelLinear 'x': expected out_features that the group's "
        "size 2 divides, got 7. Pad the layer, or choose another group.",
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
        up, gate = lowtide.sp_gather_linear(
            x, [self.up, self.gate], group=self.tp, name="in", regather=True
        )
        return lowtide.sp_reduce_scatter(F.linear(up * gate.sin(), self.down), tp)


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
