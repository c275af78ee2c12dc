"""What goes over the wire: the same collectives on all ranks, and how many bytes.

Ranks that use different parameters still take part in the same collectives.
FSDP2 mixes the gradients of two same-sized parameters here, so the expected
gradients are written out: the average over ranks of each rank's own gradient,
zero where a rank did not use the parameter, None where none did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowtide._sharding.unit import unit_state
from support.bits import difference, same_bits
from support.model import ModelConfig, build, loss_fn
from support.model import batch as llama_batch
from support.reference import average
from support.systems import get_system
from support.training import Run, shard

DIM = 6
ROUTES = ("first", "second", "third", "fourth", "unused")

# Which weights rank r multiplies by, in that order, at step s of 3.
Routing = Callable[[int, int], tuple[str, ...]]


def different_orders(rank: int, step: int) -> tuple[str, ...]:
    """All ranks use the same weights; completion order differs by rank."""
    names = ("first", "second", "third", "fourth")
    shift = (rank + step) % len(names)
    return names[shift:] + names[:shift]


def only_on_one_rank(rank: int, step: int) -> tuple[str, ...]:
    return ("first", "second") if rank == 0 else ("third", "first")


def changing_with_the_step(rank: int, step: int) -> tuple[str, ...]:
    """`fourth` is used nowhere in step 0, on rank 0 in step 1, then nowhere."""
    if step == 1 and rank == 0:
        return ("first", "fourth")
    return ("first", "second") if (rank + step) % 2 else ("second", "first")


ROUTINGS: dict[str, Routing] = {
    routing.__name__: routing
    for routing in (different_orders, only_on_one_rank, changing_with_the_step)
}


class Routed(nn.Module):
    """Same-sized weights of which `route` picks some, in an order."""

    def __init__(self) -> None:
        super().__init__()
        for name in ROUTES:
            self.register_module(name, nn.Linear(DIM, DIM, bias=False))
        self.route: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.route:
            x = x + torch.tanh(getattr(self, name)(x))
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(3))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, route: tuple[str, ...]) -> torch.Tensor:
        for block in self.blocks:
            block.route = route
            x = block(x)
        return self.out(x).sum()


def build_net() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs(rank: int, step: int, microbatch: int) -> torch.Tensor:
    seed = 1 + rank + 10 * step + 100 * microbatch
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))


def expected_grads(
    routing: Routing, step: int, microbatches: int
) -> dict[str, torch.Tensor | None]:
    """Reduced once, after the last microbatch."""
    by_rank = []
    for rank in range(dist.get_world_size()):
        net = build_net()
        for microbatch in range(microbatches):
            net(inputs(rank, step, microbatch), routing(rank, step)).backward()
        by_rank.append({name: p.grad for name, p in net.named_parameters()})
    return {name: average([grads[name] for grads in by_rank]) for name in by_rank[0]}


def counters(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(calls, bytes this rank sends) so far, over both groups of the mesh."""
    state = unit_state(model)
    assert state is not None
    gather, reduce = state.groups.gather.counters, state.groups.reduce.counters
    return {
        kind: tuple(a + b for a, b in zip(gather[kind], reduce[kind], strict=True))
        for kind in gather
    }


def sent(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    return {
        kind: (after[kind][0] - before[kind][0], after[kind][1] - before[kind][1])
        for kind in after
    }


def train_routed(routing_name: str, microbatches: int) -> tuple[list[str], Any]:
    """What differs from the expected gradients over three steps, and what was sent
    in each."""
    routing, rank = ROUTINGS[routing_name], dist.get_rank()
    system = get_system("lowtide")
    net: Any = build_net()
    for block in net.blocks:
        system.fully_shard(block)
    system.fully_shard(net)
    wrong, wire = [], []
    for step in range(3):
        before = counters(net)
        for microbatch in range(microbatches):
            net.set_requires_gradient_sync(microbatch == microbatches - 1)
            net(inputs(rank, step, microbatch), routing(rank, step)).backward()
        wire.append(sent(before, counters(net)))
        expected = expected_grads(routing, step, microbatches)
        for name, p in net.named_parameters():
            got = None if p.grad is None else p.grad.full_tensor()
            if not same_bits(got, expected[name]):
                wrong.append(f"step {step} {name}: {difference(got, expected[name])}")
        net.zero_grad()
    return wrong, wire


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_ranks_that_use_different_parameters(
    pool_of, world_size, routing, microbatches
):
    results = pool_of(world_size).run(train_routed, routing, microbatches, timeout=60)
    assert [wrong for wrong, _ in results] == [[]] * world_size
    assert all(wire == results[0][1] for _, wire in results)


def grads_set(routing_name: str) -> list[list[str]]:
    """Names whose .grad is None, by step."""
    routing, rank = ROUTINGS[routing_name], dist.get_rank()
    system = get_system("lowtide")
    net: Any = build_net()
    system.fully_shard(net)
    names = []
    for step in range(3):
        net(inputs(rank, step, 0), routing(rank, step)).backward()
        names.append([n for n, p in net.named_parameters() if p.grad is None])
        net.zero_grad()
    return names


def test_grad_is_none_where_no_rank_used_the_parameter(pool_of, world_size):
    unused = {
        step: [
            f"blocks.{i}.{name}.weight"
            for i in range(3)
            for name in ROUTES
            if not any(
                name in changing_with_the_step(rank, step) for rank in range(world_size)
            )
        ]
        for step in range(3)
    }
    for by_step in pool_of(world_size).run(grads_set, "changing_with_the_step"):
        assert by_step == [unused[step] for step in range(3)]


def steady_wire_bytes(run: Run) -> dict[str, tuple[int, int]]:
    """What this rank sends in the third step."""
    model = shard(build(run.model), run, get_system("lowtide"))
    before = counters(model)
    for step in range(3):
        before = counters(model)
        ids, targets = llama_batch(run.model, step, 0, dist.get_rank())
        loss_fn(model(ids), targets).backward()
        model.zero_grad()
    return sent(before, counters(model))


@pytest.mark.parametrize("config", [ModelConfig(), ModelConfig(dim=64, vocab=256)])
def test_bytes_on_the_wire_are_the_plans(pool_of, world_size, config):
    model = build(config)
    blocks = [list(layer.parameters()) for layer in model.layers]
    in_blocks = {id(p) for block in blocks for p in block}
    root = [p for p in model.parameters() if id(p) not in in_blocks]

    def padded(unit: list[nn.Parameter], multiple: int = 1) -> list[int]:
        """Elements this rank sends of each parameter, to each other rank."""
        numel = [-(-p.shape[0] // world_size) * p[0].numel() for p in unit]
        return [-(-n // multiple) * multiple for n in numel]

    peers = world_size - 1
    # bf16, blocks in forward and backward, the root stays between them.
    # All parameters are small enough to share a row, 16 elements apart.
    assert all(p.numel() * 2 <= 64 << 10 for p in model.parameters())
    gathered = peers * 2 * sum(sum(padded(u, 16)) for u in (root, *blocks, *blocks))
    # fp32, once; columns are padded to 128 in all, pieces to 64, plus flags.
    reduced = peers * 4 * sum(sum(padded(u)) for u in (root, *blocks))
    slack = peers * 4 * sum(128 + 63 * len(u) + 128 for u in (root, *blocks))
    for wire in pool_of(world_size).run(steady_wire_bytes, Run(config, world_size)):
        assert wire["all-gather"] == (1 + 2 * len(blocks), gathered)
        calls, num_bytes = wire["reduce-scatter"]
        assert calls == 1 + len(blocks)
        assert reduced <= num_bytes <= reduced + slack
        assert wire["all-reduce"] == (0, 0)
