"""A sharded model leaves as safetensors and loads into an unwrapped one, strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)

from support.bits import assert_same_tensors
from support.model import TINY, batch, build, loss_fn
from support.models import MODELS
from support.systems import get_system
from support.training import Run, adamw, shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def train_and_export(system: str, path: Path) -> dict[str, torch.Tensor]:
    """The full parameters on every rank; rank 0 writes the file."""
    run = Run(TINY, dist.get_world_size())
    model: Any = shard(build(TINY), run, get_system(system))
    optimizer = adamw(model)
    inputs, targets = batch(TINY, 0, 0, dist.get_rank())
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
    state = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        save_file(state, path)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_safetensors_load_strictly(pool_of, tmp_path, num_ranks):
    expected = pool_of(num_ranks).run(
        train_and_export, "lowtide", tmp_path / "model.safetensors"
    )[0]
    model = build(TINY, seed=1)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    loaded = {name: p.detach() for name, p in model.named_parameters()}
    assert_same_tensors(loaded, expected, "loaded parameters")
    pool_of(num_ranks).run(train_and_export, "fsdp2", tmp_path / "fsdp2.safetensors")
    assert_same_tensors(
        load_file(tmp_path / "fsdp2.safetensors"),
        load_file(tmp_path / "model.safetensors"),
        "files of both systems",
    )


def save_pretrained(name: str, path: Path) -> dict[str, torch.Tensor]:
    import lowtide

    torch.manual_seed(2)
    model = lowtide.wrap(MODELS[name].build())
    generator = torch.Generator().manual_seed(dist.get_rank())
    MODELS[name].loss(model, generator).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    state = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        # It empties the dict it is given.
        model.save_pretrained(path, state_dict=dict(state))
    return state


@pytest.mark.parametrize("name", ["llama", "qwen3_tied", "t5"])
def test_hugging_face_model_loads_what_was_exported(pool_of, tmp_path, name):
    exported = pool_of(2).run(save_pretrained, name, tmp_path)[0]
    plain = MODELS[name].build()
    ties = len(dict(plain.named_parameters(remove_duplicate=False))) - len(
        list(plain.parameters())
    )
    plain.load_state_dict(exported, strict=True)
    loaded = type(plain).from_pretrained(tmp_path)
    for model in (plain, loaded):
        state = model.state_dict()
        assert sorted(state) == sorted(exported)
        assert all(torch.equal(state[name], exported[name]) for name in state)
    names = len(dict(plain.named_parameters(remove_duplicate=False)))
    assert names - len(list(plain.parameters())) == ties
    assert (ties > 0) == (name != "llama")
