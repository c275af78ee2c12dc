"""Distributed checkpoints: written, read, exchanged with FSDP2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from support.bits import assert_same_tensors, assert_same_traces
from support.model import TINY, build
from support.systems import get_system
from support.training import Run, Trace, adamw, local, shard, stitch, train_step

SAVED_AFTER = 2
NUM_STEPS = 4
MOMENTS = ("exp_avg", "exp_avg_sq")


def make(system: str, run: Run, seed: int = 0) -> tuple[Any, torch.optim.AdamW]:
    model = shard(build(run.model, seed), run, get_system(system))
    return model, adamw(model)


def state_of(model: Any, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Shards of parameters and moments by name."""
    state = {}
    for name, p in model.named_parameters():
        state[name] = local(p).clone()
        for moment in MOMENTS:
            state[f"{name}.{moment}"] = local(optimizer.state[p][moment]).clone()
    return state


def train_and_save(
    system: str, run: Run, path: Path, background: bool
) -> tuple[dict[str, torch.Tensor], Trace]:
    """The state at the checkpoint, and the steps after it."""
    model, optimizer = make(system, run)
    for step in range(SAVED_AFTER):
        train_step(model, optimizer, run, step, Trace())
    saved = state_of(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    if background:
        future = dcp.async_save(content, checkpoint_id=path)
        future.result()
    else:
        dcp.save(content, checkpoint_id=path)
    trace = Trace()
    for step in range(SAVED_AFTER, NUM_STEPS):
        train_step(model, optimizer, run, step, trace)
    return saved, trace


def load_and_train(
    system: str, run: Run, path: Path
) -> tuple[dict[str, torch.Tensor], Trace]:
    model, optimizer = make(system, run, seed=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    loaded = state_of(model, optimizer)
    trace = Trace()
    for step in range(SAVED_AFTER, NUM_STEPS):
        train_step(model, optimizer, run, step, trace)
    return loaded, trace


def stitched(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: stitch([state[name] for state in states]) for name in states[0]}


PAIRS = (
    ("fsdp2", "fsdp2"),
    ("lowtide", "lowtide"),
    ("lowtide", "fsdp2"),
    ("fsdp2", "lowtide"),
)


@pytest.mark.parametrize("background", [False, True], ids=("save", "async_save"))
@pytest.mark.parametrize("pair", PAIRS, ids="_to_".join)
def test_training_continues_bit_equal(pool_of, tmp_path, world_size, pair, background):
    run = Run(TINY, world_size)
    writer, reader = pair
    pool = pool_of(world_size)
    saved = pool.run(train_and_save, writer, run, tmp_path / "ckpt", background)
    loaded = pool.run(load_and_train, reader, run, tmp_path / "ckpt")
    for rank in range(world_size):
        assert_same_tensors(loaded[rank][0], saved[rank][0], f"state on rank {rank}")
    assert_same_traces([trace for _, trace in loaded], [trace for _, trace in saved])


@pytest.mark.parametrize("pair", PAIRS, ids="_to_".join)
@pytest.mark.parametrize("sizes", [(2, 1), (2, 3), (3, 4), (4, 2), (1, 4)])
def test_another_world_size_loads_the_same_state(pool_of, tmp_path, sizes, pair):
    before, after = sizes
    writer, reader = pair
    run = Run(TINY, before)
    saved = pool_of(before).run(train_and_save, writer, run, tmp_path / "ckpt", False)
    run = replace(run, world_size=after)
    loaded = pool_of(after).run(load_and_train, reader, run, tmp_path / "ckpt")
    assert_same_tensors(
        stitched([state for state, _ in loaded]),
        stitched([state for state, _ in saved]),
        f"state saved by {before} ranks and loaded by {after}",
    )


def full_state_round_trip(
    system: str, run: Run
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Rank 0's full state dict, and the shards of a model that loads it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(make(system, run)[0], options=options)
    model, _ = make(system, run, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # It shards the tensors of the dict it is given in place.
    given = dict(full) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=options)
    return full, {name: local(p).clone() for name, p in model.named_parameters()}


def test_full_state_dict_goes_out_and_in(pool_of, system, world_size):
    run = Run(TINY, world_size)
    results = pool_of(world_size).run(full_state_round_trip, system, run)
    expected = {name: p.detach() for name, p in build(TINY).named_parameters()}
    assert_same_tensors(results[0][0], expected, "full state dict")
    shards = [shards for _, shards in results]
    assert_same_tensors(stitched(shards), expected, "loaded parameters")
