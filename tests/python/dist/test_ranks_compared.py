"""Ranks whose data differs issue the same collectives in one order; ranks that run
something else hear so before anything of it reaches ``.grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lowtide import fully_shard
from lowtide._sharding import groups
from support.layers import Blocks, data
from support.meshes import strided_mesh
from support.random_steps import call_log
from support.ranks import RankPool


def sharded() -> Any:
    torch.manual_seed(0)
    model = Blocks()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def differing(what: str) -> str:
    """What is raised on this rank in a step in which rank 1 does it."""
    model = sharded()
    model(data(0)).sum().backward()
    model.zero_grad()
    if what == "frozen while shown":
        model.layers[1].unshard()
    if what == "heads":  # of one size, each a unit of its own
        model.calls = (0, 1)
    if dist.get_rank() == 1:
        if what == "order":
            model.calls = (0, 2, 1)
        elif what == "heads":
            model.calls = (0, 2)
        elif what.startswith("frozen"):
            model.layers[1].weight.requires_grad_(False)
        elif what == "factor":
            model.layers[1].set_gradient_divide_factor(7.0)
    with pytest.raises(RuntimeError, match="every rank to run the same") as error:
        model(data(1)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.calls = (0, 1, 2)
    model.layers[1].reshard()
    model.layers[1].weight.requires_grad_(True)
    model.layers[1].set_gradient_divide_factor(2.0)
    model(data(2)).sum().backward()  # the ranks go on together
    assert all(p.grad is not None for p in model.parameters())
    return str(error.value)


DIFFERENCES = {
    "order": "the all-gather of unit 'layers.2' on rank 0 and the all-gather of unit "
    "'layers.1' on rank 1",
    "heads": "the all-gather of unit 'layers.1' on rank 0 and the all-gather of unit "
    "'layers.2' on rank 1",
    "frozen": "unit 'layers.1' (frozen: 'layers.1.weight'; ",
    "frozen while shown": "unit 'layers.1' (frozen: 'layers.1.weight'; ",
    "factor": "other settings of unit 'layers.1' (gradient_divide_factor=7; ",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_later_are_named(pool_of, what):
    for rank, text in enumerate(pool_of(2).run(differing, what)):
        assert f"(rank {rank} of 2)" in text
        assert "on rank 1" in text
        assert DIFFERENCES[what] in text


def one_replica_freezes() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model: Any = Blocks()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(data(0)).sum().backward()
    if mesh.get_local_rank("replicas") == 1:
        model.layers[2].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="every rank to run the same") as error:
        model(data(1)).sum().backward()
    return str(error.value)


def test_replicas_are_compared_too(pool_of):
    for text in pool_of(4).run(one_replica_freezes):
        assert "(frozen: 'layers.2.bias'; " in text
        assert "on rank 2, call " in text


def a_unit_that_one_rank_has() -> str:
    """On a mesh of its own."""
    alone = strided_mesh(1)
    model = Blocks()
    fully_shard(model.layers[0])
    if dist.get_rank() == 1:
        fully_shard(model.layers[1], mesh=alone)
    model.layers[1].requires_grad_(False)
    ignored = set(model.layers[1].parameters())
    sharded: Any = fully_shard(model, ignored_params=ignored)
    with pytest.raises(RuntimeError) as error:
        sharded(data(0))
    return str(error.value)


def test_a_unit_on_another_mesh_that_one_rank_has_is_named():
    """In processes of its own: torch names groups by how many a rank has made."""
    with RankPool(2) as pool:
        for text in pool.run(a_unit_that_one_rank_has):
            assert (
                "got nothing more on rank 0 and several meshes under units 'Blocks, "
                "layers.0, layers.1' on rank 1" in text
            )


def gathered_in_another_order() -> str:
    """By `unshard()` before the root is known, so before anything is compared."""
    model = sharded()
    for number in (1, 2) if dist.get_rank() == 0 else (2, 1):
        model.layers[number].unshard()
    with pytest.raises(RuntimeError) as error:
        model(data(0)).sum().backward()
    return str(error.value)


def test_units_gathered_before_the_first_forward_are_compared(pool_of):
    for text in pool_of(2).run(gathered_in_another_order):
        assert (
            "got unit 'layers.1' gathered as number 0 before the forward on rank 0 and "
            "unit 'layers.2' gathered as number 0 before the forward on rank 1" in text
        )


def gathered_ahead_on_one_rank() -> str:
    """Unit 2 is expected behind unit 1, which rank 1 runs behind unit 2."""
    model = sharded()
    model.calls = (2, 0, 1, 2)
    model(data(0)).sum().backward()
    model.zero_grad()
    model.calls = (0, 1, 2) if dist.get_rank() == 0 else (2, 1, 0)
    with pytest.raises(RuntimeError) as error:
        model(data(1)).sum().backward()
    return str(error.value)


def test_a_gather_that_other_ranks_lack_is_named_before_it_is_waited_for():
    with RankPool(2, group_timeout=8.0) as pool:
        for text in pool.run(gathered_ahead_on_one_rank, timeout=60):
            assert "expected every rank to run the same units" in text, text


# -- what may differ ------------------------------------------------------------------

KEPT: list[Any] = []


def penalty_kept(model: Any, step: int, differs: bool) -> None:
    """As where one rank adds up a loss for its log, graph and all."""
    x = data(step, grad=True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.square().mean() + slope.square().mean()
    loss.backward()
    if differs:
        KEPT.append((loss, slope))


def graph_kept(model: Any, step: int, differs: bool) -> None:
    loss = model(data(step)).square().mean()
    loss.backward(retain_graph=differs)
    if differs:
        KEPT.append(loss)


def graph_kept_of_a_unit_without_inputs(model: Any, step: int, differs: bool) -> None:
    """Of one behind which two more run in backward."""
    second = data(step + 9)

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + layer(second) if layer is model.layers[2] else layer(x)

    model.wrap_call = call
    for further in range(2):
        loss = model(data(step + further)).square().mean()
        loss.backward(retain_graph=differs)
    model.wrap_call = lambda layer, x: layer(x)


def output_kept(model: Any, step: int, differs: bool) -> None:
    out = model(data(step))
    if differs:
        KEPT.append(out)


def hook_on_a_gradient(model: Any, step: int, differs: bool) -> None:
    if differs and not KEPT:
        KEPT.append(step)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(KEPT.append)
    model(data(step)).square().mean().backward()
    assert not differs or len(KEPT) > 1


def input_that_wants_a_gradient(model: Any, step: int, differs: bool) -> None:
    model(data(step, grad=differs)).square().mean().backward()


def twice_from_an_input_that_wants_a_gradient(
    model: Any, step: int, differs: bool
) -> None:
    loss = model(data(step, grad=differs)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def second_input_that_wants_a_gradient(model: Any, step: int, differs: bool) -> None:
    """Of a unit behind which others run in backward."""
    second = data(step + 9, grad=differs)

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + layer(second) if layer is model.layers[1] else layer(x)

    model.wrap_call = call
    for _ in range(2):
        loss = model(data(step)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    model.wrap_call = lambda layer, x: layer(x)


def inputs_of_one_call_that_want_gradients(
    model: Any, step: int, differs: bool
) -> None:
    """Of a unit that is called twice, and whose last call comes first in backward."""
    second, third = data(step + 8), data(step + 9, grad=differs)

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if layer is not model.layers[1]:
            return layer(x)
        return x + layer(second) + layer(third)

    model.wrap_call = call
    model(data(step)).square().mean().backward()
    model.wrap_call = lambda layer, x: layer(x)


MAY_DIFFER = {
    one.__name__: one
    for one in (
        penalty_kept,
        graph_kept,
        graph_kept_of_a_unit_without_inputs,
        output_kept,
        hook_on_a_gradient,
        input_that_wants_a_gradient,
        twice_from_an_input_that_wants_a_gradient,
        second_input_that_wants_a_gradient,
        inputs_of_one_call_that_want_gradients,
    )
}


# Which rank differs, and from which step on: in the first one ranks that are not
# compared take over what rank 0 has.
WHO = {"first": (0, 0), "second later": (1, 1)}


def gradients_of_steps(model: Any, name: str, who: str | None) -> list[torch.Tensor]:
    """This rank's rows, of the steps between those in which a rank may differ."""
    gradients = []
    for step in range(4):
        differs = who is not None and dist.get_rank() == WHO[who][0]
        MAY_DIFFER[name](model, 10 * step, differs and step >= WHO[who][1])
        model.zero_grad()
        for further in range(1, 4):
            model(data(10 * step + further)).square().sum().backward()
            gradients += [p.grad.to_local().clone() for p in model.parameters()]
            model.zero_grad()
        if step == 0:
            model.layers[0]._get_fsdp_state().root.gradient_budget = 1
    return gradients


def train_with(
    name: str, who: str | None, shape: tuple[int, int]
) -> tuple[list[Any], list[torch.Tensor]]:
    """All calls of this rank in order, and the gradients of the steps between."""
    KEPT.clear()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    mesh = mesh if shape[0] > 1 else mesh["shards"]
    model: Any = Blocks()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    take = call_log()
    gradients = gradients_of_steps(model, name, who)
    KEPT.clear()
    return take(), gradients


@pytest.fixture(scope="module")
def recording_pools():
    pools = {
        compare: RankPool(
            2,
            group_timeout=20.0,
            env={"TORCH_FR_BUFFER_SIZE": "4000", "LOWTIDE_COMPARE_RANKS": compare},
        )
        for compare in ("on", "off")
    }
    yield pools
    for pool in pools.values():
        pool.close()


SHAPES = {"shards": (1, 2), "replicas": (2, 1)}
ORDERS = [
    (name, shape, compare, who)
    for name in MAY_DIFFER
    for shape in SHAPES
    for compare in ("on", "off")
    for who in WHO
]


@pytest.mark.parametrize(("name", "shape", "compare", "who"), ORDERS)
def test_what_one_rank_keeps_or_hears_changes_no_order(
    recording_pools, name, shape, compare, who
):
    recording_pool, shape = recording_pools[compare], SHAPES[shape]
    apart = recording_pool.run(train_with, name, who, shape, timeout=60)
    alike = recording_pool.run(train_with, name, None, shape, timeout=60)
    logs = [log for log, _ in apart]
    assert len(logs[0]) > 100
    assert logs[0] == logs[1]
    for (_, gradients), (_, expected) in zip(apart, alike, strict=True):
        assert all(map(torch.equal, gradients, expected))


# The second layer's mesh, and that of the others: on pairs of ranks of four. Where
# ranks' calls differ the comparison raises.
CROSSING = {"more ranks": ((4, 1), (2, 2)), "others": ((2, 1), (2, 2))}


def over_meshes(meshes: str) -> Any:
    torch.manual_seed(0)
    apart, rest = (strided_mesh(*of) for of in CROSSING[meshes])
    model = Blocks()
    for i, layer in enumerate(model.layers):
        fully_shard(layer, mesh=apart if i == 1 else rest)
    return fully_shard(model, mesh=rest)


def differing_over_meshes(meshes: str) -> str:
    model = over_meshes(meshes)
    model(data(0)).sum().backward()
    model.zero_grad()
    if dist.get_rank() == 1:
        model.layers[0].set_gradient_divide_factor(7.0)
    with pytest.raises(RuntimeError, match="every rank to run the same") as error:
        model(data(1)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.layers[0].set_gradient_divide_factor(2.0)
    model(data(2)).sum().backward()  # the ranks go on together
    assert all(p.grad is not None for p in model.parameters())
    return str(error.value)


@pytest.mark.parametrize("meshes", CROSSING)
def test_all_ranks_of_several_meshes_hear_of_one_that_differs(pool_of, meshes):
    for rank, text in enumerate(pool_of(4).run(differing_over_meshes, meshes)):
        assert f"(rank {rank} of 4)" in text
        assert "unit 'layers.0' (gradient_divide_factor=7; " in text


def train_over_meshes(name: str, who: str | None, meshes: str) -> list[torch.Tensor]:
    KEPT.clear()
    model = over_meshes(meshes)
    gradients = gradients_of_steps(model, name, who)
    KEPT.clear()
    return gradients


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("meshes", CROSSING)
@pytest.mark.parametrize("name", MAY_DIFFER)
def test_what_one_rank_keeps_or_hears_changes_no_order_over_several_meshes(
    pool_of, name, meshes, who
):
    pool = pool_of(4)
    apart = pool.run(train_over_meshes, name, who, meshes)
    alike = pool.run(train_over_meshes, name, None, meshes)
    for gradients, expected in zip(apart, alike, strict=True):
        assert all(map(torch.equal, gradients, expected))


def train_through_a_kept_graph_and_a_later_one() -> tuple[str, bool]:
    """The error, and whether gradients are those of the two losses apart."""
    model = sharded()
    losses = [model(data(0)).square().sum()]
    losses[0].backward(retain_graph=True)
    losses += [model(data(1)).square().sum()]
    model.zero_grad()
    try:
        sum(losses).backward()
    except RuntimeError as error:
        return str(error), False
    together = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    for step in range(2):
        model(data(step)).square().sum().backward()
    apart = [p.grad.full_tensor() for p in model.parameters()]
    return "", all(map(torch.allclose, together, apart))


def test_a_kept_graph_may_run_behind_a_later_one(recording_pools):
    run = train_through_a_kept_graph_and_a_later_one
    assert recording_pools["on"].run(run) == [("", True)] * 2
    for text, _ in recording_pools["off"].run(run):
        assert text.startswith(
            "lowtide: parameter 'layers.2.bias': expected every gradient of a backward "
            "before its unit's gradients leave, got another one after unit 'layers.2' "
        )
        assert text.endswith("run two, or leave LOWTIDE_COMPARE_RANKS on.")


class AskedInBackward(torch.autograd.Function):
    """As a batch norm over all ranks: a collective of the program's own, on the group
    that gathers use, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ranks = torch.ones(4)
        dist.all_reduce(ranks)
        return gradient * (ranks[0] / dist.get_world_size())


class Block(nn.Module):
    asks = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor, unused: int) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i == 3 and self.asks:
                x = AskedInBackward.apply(x)
            if i != unused:
                x = torch.tanh(layer(x))
        return x


class Towers(nn.Module):
    """Blocks of wide layers, one of which a rank may leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, unused: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, unused)
        return x


ROWS = ((8, 4000), (4000, 8), (1, 2000))
# So many that a gather waits for gradients.
MANY_ROWS = ((3000, 4000), (4000, 3000), (2500, 3500), (4000, 4000))


def train_on_different_rows(
    budget: int, all_rows: Any = ROWS, asks: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = Towers()
    for block in model.blocks:
        block.asks = asks
        fully_shard(block)
    fully_shard(model)
    rank = dist.get_rank()
    for step, rows in enumerate(all_rows):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(rows[rank], 64)
        unused = step + 2 if rank == 1 else -1
        model(x, unused).square().mean().backward()
        if step == 0:
            model.blocks[0]._get_fsdp_state().root.gradient_budget = budget
    return [p.grad.full_tensor() for p in model.parameters()]


def rule_on_different_rows(all_rows: Any = ROWS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Towers()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for step, rows in enumerate(all_rows):
        by_rank = []
        for rank in range(2):
            model.zero_grad()
            torch.manual_seed(10 * step + rank)
            x = torch.randn(rows[rank], 64)
            model(x, step + 2 if rank == 1 else -1).square().mean().backward()
            by_rank.append([p.grad for p in model.parameters()])
        for sum_, *grads in zip(total, *by_rank, strict=True):
            mean = torch.zeros_like(sum_)
            for grad in grads:
                mean += grad if grad is not None else 0
            sum_ += mean / 2
    return total


@pytest.fixture(scope="module")
def shared_pools():
    pools = {
        compare: RankPool(
            2,
            env={"LOWTIDE_COMMUNICATORS": "shared", "LOWTIDE_COMPARE_RANKS": compare},
        )
        for compare in ("on", "off")
    }
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("compare", ["on", "off"])
@pytest.mark.parametrize("budget", [1, 64 << 20])
def test_ranks_with_different_rows_share_one_communicator(
    shared_pools, budget, compare
):
    """A second order would mix gathers and reductions up, or hang."""
    pool = shared_pools[compare]
    expected = pool.run(rule_on_different_rows)[0]
    for grads in pool.run(train_on_different_rows, budget, timeout=60):
        for grad, want in zip(grads, expected, strict=True):
            assert torch.equal(grad, want)


@pytest.mark.parametrize("communicators", ["separate", "shared"])
def test_the_programs_own_collectives_keep_their_places(
    pool_of, shared_pools, communicators
):
    """Inside a backward, where ranks have other rows and leave other parameters
    unused."""
    pool = shared_pools["on"] if communicators == "shared" else pool_of(2)
    expected = pool.run(rule_on_different_rows, MANY_ROWS)[0]
    for grads in pool.run(train_on_different_rows, 1, MANY_ROWS, True, timeout=30):
        for grad, want in zip(grads, expected, strict=True):
            assert torch.equal(grad, want)


def test_an_unknown_way_to_compare_is_refused(monkeypatch):
    monkeypatch.setenv("LOWTIDE_COMPARE_RANKS", "sometimes")
    with pytest.raises(ValueError, match="LOWTIDE_COMPARE_RANKS: expected on or off"):
        groups.compares_ranks()
