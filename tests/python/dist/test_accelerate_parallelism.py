"""accelerate's `ParallelismConfig` beside its FSDP2 plugin, with lowtide as with FSDP2:
replicas, and torch's context parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lowtide
from lowtide.integrations.accelerate import use_lowtide
from support import accelerate_on_cpus, context_parallel
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records
from support.transformers_versions import SHARDS, SHARDS_NOT

WORDS, TOKENS, ROWS = 64, 16, 32

# Sizes, and how the mesh is shaped over which parameters are placed.
CASES: dict[str, tuple[int, dict[str, int], str]] = {
    "replicas": (
        *(4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
        "dp_replicate=2, dp_shard_cp=2",
    ),
    "context": (2, {"cp_size": 2}, "dp_shard_cp=2"),
    "shards and context": (4, {"dp_shard_size": 2, "cp_size": 2}, "dp_shard_cp=4"),
}


def accelerator_with(**sizes: int) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    accelerate_on_cpus.accept_cpus()
    accelerate_on_cpus.as_torchrun(dist.get_rank(), dist.get_world_size())
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=ParallelismConfig(**sizes),
        gradient_accumulation_steps=2,
    )


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def train(
    system: str, sizes: dict[str, int], folder: Path
) -> tuple[Record, set[str], bool]:
    """An epoch and a checkpoint; the record, the parameters' meshes, and whether all
    blocks are lowtide's."""
    record = Recorder()
    context_parallel.prepare()
    accelerator = accelerator_with(**sizes)
    try:
        if system == "lowtide":
            use_lowtide(accelerator)
        model: Any = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        generator = torch.Generator().manual_seed(3)
        rows = torch.randint(0, WORDS, (ROWS, TOKENS), generator=generator)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2)
        )
        for ids in loader:
            # Buffers that the context splits over its ranks.
            buffers = [ids, ids.clone(), torch.arange(TOKENS).repeat(len(ids), 1)]
            with (
                accelerator.accumulate(model),
                accelerator.maybe_context_parallel(
                    buffers=buffers,
                    buffer_seq_dims=[1] * len(buffers),
                    no_restore_buffers=set(buffers),
                ),
            ):
                ids, labels, positions = buffers
                loss = model(input_ids=ids, position_ids=positions, labels=labels).loss
                record.add("loss", loss)
                accelerator.backward(loss)
                record.add_model(model)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    record.add("norm", norm)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
        for name, value in accelerator.get_state_dict(model).items():
            record.add(f"full {name}", value)
        accelerator.load_state(folder)
        record.add_model(model)
        meshes = {str(p.device_mesh) for p in model.parameters()}
    finally:
        accelerate_on_cpus.forget()
    units = [model, *model.model.layers]
    own = all(isinstance(unit, lowtide.FSDPModule) for unit in units)
    return record.values, meshes, own


@pytest.mark.parametrize("case", CASES)
def test_trains_and_checkpoints_with_the_bits_of_fsdp2(tmp_path, case):
    ranks, sizes, shape = CASES[case]
    with RankPool(ranks) as pool:  # accelerate changes environment variables
        theirs = pool.run(train, "fsdp2", sizes, tmp_path / "fsdp2")
        ours = pool.run(train, "lowtide", sizes, tmp_path / "lowtide")
    for (mine, meshes, own), (other, there, foreign) in zip(ours, theirs, strict=True):
        assert own and not foreign
        assert meshes == there and all(shape in mesh for mesh in meshes)
        steps = ROWS // 2 * sizes.get("cp_size", 1) // ranks // 2
        assert [n for n, _ in mine].count("norm") == steps
        assert_same_records(mine, other)


def prepare_tensor_parallel() -> None:
    accelerator = use_lowtide(accelerator_with(dp_shard_size=2, tp_size=2))
    try:
        model = llama()
        mesh = accelerator.torch_device_mesh["tp"]
        for layer in model.model.layers:
            parallelize_module(layer, mesh, {"mlp.gate_proj": ColwiseParallel()})
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        accelerate_on_cpus.forget()


@pytest.mark.skipif(not SHARDS, reason=SHARDS_NOT)
def test_tensor_parallelism_is_refused_by_name():
    """accelerate imports what transformers 5.24 has no more."""
    with RankPool(4) as pool:
        outcomes = pool.outcomes(prepare_tensor_parallel, timeout=60)
    for outcome in outcomes:
        assert outcome.error.startswith(
            "lowtide: integrations.accelerate: expected a transformers that has "
            "ReplicateParallel, which accelerate needs for "
            "ParallelismConfig(tp_size=2), got one without it ("
        )
        assert "DistributedConfig(tp_size=..., fsdp_size=...)" in outcome.error
