"""Blocks compiled with fullgraph: the bits of FSDP2 compiled the same way, in one graph
that no later step compiles again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from support.model import ModelConfig, batch, build, loss_fn
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records, finish_step
from support.systems import get_system
from support.training import adamw

CONFIG = ModelConfig(num_layers=2)
NUM_STEPS = 4


def train(system_name: str, backend: str) -> tuple[Record, int]:
    """Everything computed, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    system = get_system(system_name)
    model: Any = build(CONFIG)
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
        system.fully_shard(layer, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    system.prepare(model)
    optimizer = adamw(model, foreach=False)
    record = Recorder()
    for step in range(NUM_STEPS):
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            ids, targets = batch(CONFIG, step, 0, dist.get_rank())
            loss = loss_fn(model(ids), targets)
            record.add("loss", loss)
            loss.backward()
        finish_step(model, optimizer, record)
    record.add_model(model)
    return record.values, counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    pools: list[RankPool] = []

    @cache
    def make(num_ranks: int) -> RankPool:
        pools.append(RankPool(num_ranks, group_timeout=500))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.timeout(600)  # inductor runs C++ compilers
@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [("aot_eager", 1), ("aot_eager", 2), ("aot_eager", 4), ("inductor", 2)],
)
def test_compiled_blocks_have_the_bits_of_fsdp2(
    pool_of: Callable[[int], RankPool], backend: str, num_ranks: int
) -> None:
    pool = pool_of(num_ranks)
    theirs = pool.run(train, "fsdp2", backend, timeout=500)
    ours = pool.run(train, "lowtide", backend, timeout=500)
    for (mine, graphs), (other, _) in zip(ours, theirs, strict=True):
        assert graphs == 1
        assert_same_records(mine, other)
