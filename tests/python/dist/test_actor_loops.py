"""A trainer of reinforcement learning between two generations, with the calls that
verl's workers make: weights from rank 0 alone, log-probabilities, microbatches that
each reduce, steps that are left out, weights handed on, files for each rank; the bits
of FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

from support.recorder import Record, Recorder, assert_same_records
from support.systems import System, get_system

WORDS, STEPS = 64, 3


def language_model(lora: bool) -> Any:
    from accelerate import init_empty_weights
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        model = Qwen2ForCausalLM(config)
    else:
        with init_empty_weights():
            model = Qwen2ForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def load_from_rank_0(model: Any, full: dict[str, Any], offloaded: bool) -> None:
    """Everybody else has nothing yet."""
    if dist.get_rank() == 0:
        model.to(device="cpu", non_blocking=True)
    else:
        model.to_empty(device="cpu")
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=offloaded, broadcast_from_rank0=True
    )
    set_model_state_dict(model, full, options=options)
    for buffer in model.buffers():  # no state dict has those of positions
        dist.broadcast(buffer, src=0)


def first_even_dimension(size: int) -> Any:
    def place(p: nn.Parameter) -> Shard:
        return Shard(next((d for d, n in enumerate(p.shape) if n % size == 0), 0))

    return place


def sharded(system: System, how: set[str]) -> Any:
    model = language_model("lora" in how)
    if "replicas" in how:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    if "offloaded" in how:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "placed" in how:
        settings["shard_placement_fn"] = first_even_dimension(mesh.size(-1))
    full = model.state_dict()  # of the tensors that are sharded now
    units = [
        module
        for module in model.modules()
        if type(module).__name__ == "Qwen2DecoderLayer"
        or isinstance(module, nn.Embedding)
    ]
    for module in (*units, model):
        system.fully_shard(module, **settings)
    load_from_rank_0(model, full, "offloaded" in how)
    return model


def leave(model: Any, optimizer: Any) -> None:
    model.cpu()
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.to("cpu", non_blocking=True)


def clip(model: Any) -> torch.Tensor:
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _get_total_norm(gradients, 2.0, False, None).to("cpu", non_blocking=True)
    _clip_grads_with_norm_(parameters, 0.7, norm, None)
    return norm.full_tensor()


def handed_on(model: Any, lora: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """To an engine: every weight, or the adapters, one unit after the other."""
    modules = [("", model)]
    if lora:
        modules = [
            (name, module)
            for name, module in model.named_modules()
            if type(module).__name__.endswith("Qwen2DecoderLayer")
        ]
    for name, module in modules:
        # What stands for FSDP1 there as well.
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            for key, value in module.state_dict().items():
                if "lora_" in key or not lora:
                    is_shard = isinstance(value, DTensor)
                    yield f"{name}.{key}", value.full_tensor() if is_shard else value


def train(system_name: str, how: set[str], folder: Path) -> Record:
    model = sharded(get_system(system_name), how)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    record = Recorder()
    leave(model, optimizer)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, WORDS, (4, 12), generator=generator)
        model.to("cpu")
        model.eval()
        with torch.no_grad():
            record.add("log-probabilities", model(input_ids=tokens).logits)
        leave(model, optimizer)
        model.to("cpu")
        model.train()
        for part in tokens.chunk(2):
            loss = model(input_ids=part, labels=part).loss / 2
            loss.backward()
            record.add("loss", loss)
        record.add("norm", clip(model))
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
        leave(model, optimizer)
        for name, value in handed_on(model, "lora" in how):
            record.add(name, value)
        if step == 1:
            reload(model, optimizer, folder / str(dist.get_rank()))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name, value in get_model_state_dict(model, options=options).items():
        record.add(name, value)
    return record.values


def reload(model: Any, optimizer: Any, path: Path) -> None:
    """A file a rank, as its shards are."""
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    weights, states = torch.load(path, weights_only=False)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)


CASES: dict[str, set[str]] = {
    "placed": {"placed"},
    "offloaded": {"offloaded"},
    "adapters": {"lora"},
    "replicas": {"replicas"},
}


SLOW = pytest.param("replicas", marks=pytest.mark.slow)


@pytest.mark.parametrize("case", ["placed", "offloaded", "adapters", SLOW])
def test_a_trainer_equals_fsdp2s(pool_of, tmp_path, case):
    how = CASES[case]
    pool = pool_of(4 if "replicas" in how else 2)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    for mine, other in zip(
        pool.run(train, "lowtide", how, ours),
        pool.run(train, "fsdp2", how, theirs),
        strict=True,
    ):
        assert_same_records(mine, other)
        assert all(math.isfinite(v.sum()) for _, v in other if v is not None)
