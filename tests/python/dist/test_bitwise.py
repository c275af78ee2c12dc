"""Losses, gradients and parameters equal the numerics rule bit for bit.

FSDP2 is held to the same rule by the same tests, so equal to the rule means
equal to FSDP2.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowtide._sharding.unit import unit_state
from support.bits import assert_follows_rule, assert_same_traces
from support.model import TINY, ModelConfig, build
from support.systems import get_system
from support.training import (
    WRAPPINGS,
    Run,
    Trace,
    adamw,
    shard,
    train_sharded,
    train_step,
)

PRECISIONS = {
    "bf16_reduce_fp32": (torch.bfloat16, torch.float32),
    "fp32": (None, None),
    "bf16_reduce_bf16": (torch.bfloat16, torch.bfloat16),
}
ACCUMULATIONS = {
    "one_microbatch": (1, "each"),
    "three_synced": (3, "each"),
    "three_synced_at_last": (3, "last"),
}


def check(pool_of, rule, system: str, run: Run) -> None:
    traces = pool_of(run.world_size).run(train_sharded, system, run)
    assert len(traces[0].losses) == run.num_steps >= 5
    assert_follows_rule(traces, rule(run))


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_uneven_rows(pool_of, rule, system, world_size, precision, accumulation):
    param_dtype, reduce_dtype = PRECISIONS[precision]
    microbatches, sync = ACCUMULATIONS[accumulation]
    run = Run(
        ModelConfig(vocab=101, ffn=42),
        world_size,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        microbatches=microbatches,
        sync=sync,
    )
    check(pool_of, rule, system, run)


# In param_dtype, from torch 2.15 on in the dtype of the parameters.
@pytest.mark.parametrize("accumulation", ["one_microbatch", "three_synced_at_last"])
def test_without_reduce_dtype_as_this_version_of_fsdp2(pool_of, accumulation):
    microbatches, sync = ACCUMULATIONS[accumulation]
    run = Run(TINY, 2, reduce_dtype=None, microbatches=microbatches, sync=sync)
    ours, theirs = (
        pool_of(2).run(train_sharded, system, run) for system in ("lowtide", "fsdp2")
    )
    assert_same_traces(ours, theirs)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_fewer_rows_than_ranks(pool_of, rule, system, world_size, accumulation):
    assert TINY.kv_dim == 2 and TINY.logit_scale
    microbatches, sync = ACCUMULATIONS[accumulation]
    run = Run(TINY, world_size, microbatches=microbatches, sync=sync)
    check(pool_of, rule, system, run)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappings(pool_of, rule, system, world_size, wrapping, reshard_after_forward):
    run = Run(
        replace(TINY, vocab=37),
        world_size,
        wrapping=wrapping,
        reshard_after_forward=reshard_after_forward,
        microbatches=3,
        sync="last" if reshard_after_forward else "each",
    )
    check(pool_of, rule, system, run)


@pytest.mark.parametrize(
    "frozen", [("layers.0.*",), ("*.wq.weight", "*norm.weight", "embed.*")]
)
def test_frozen_parameters(pool_of, rule, system, world_size, frozen):
    run = Run(replace(TINY, frozen=frozen), world_size, microbatches=2, sync="last")
    check(pool_of, rule, system, run)


def train_with_budget(run: Run, budget: int) -> tuple[Trace, int]:
    """The gradient stream holds at most `budget` bytes from step 1 on, if that is
    enough for its smallest chunks.  Also returns in how many chunks they leave."""
    model = shard(build(run.model), run, get_system("lowtide"))
    optimizer = adamw(model, **dict(run.adamw))
    trace = Trace()
    for step in range(run.num_steps):
        train_step(model, optimizer, run, step, trace)
        unit_state(model).root.gradient_budget = budget
    units = {unit_state(module) for module in model.modules()} - {None}
    return trace, sum(state.unit.plan()["gradient_chunks"] for state in units)


@pytest.mark.parametrize("budget", [1, 20_000])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunking_does_not_change_the_bits(
    pool_of, rule, world_size, reduce_dtype, budget
):
    # The smallest budget cuts every parameter into strips of 128 columns.
    run = Run(ModelConfig(), world_size, reduce_dtype=reduce_dtype)
    results = pool_of(world_size).run(train_with_budget, run, budget)
    num_units = run.model.num_layers + 1
    for _, num_chunks in results:
        assert num_chunks > (100 if budget == 1 else num_units) / world_size
    assert_follows_rule([trace for trace, _ in results], rule(run))
