"""peft's LoRA on a Llama that transformers loads in bitsandbytes' 4 bits, as FSDP-QLoRA
has it, on its backend for CPUs: the bits of FSDP2. Each layer makes its weight anew of
what was gathered in its forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide._torch_version import VERSION
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

STEPS, WORDS = 3, 64


def quantized(folder: Path, storage: torch.dtype) -> Any:
    from transformers import (
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        use_cache=False,
    )
    if dist.get_rank() == 0:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=four_bits,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
    )


def adapted(folder: Path, storage: torch.dtype) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        quantized(folder, storage),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
        autocast_adapter_dtype=False,
    )
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02, generator=generator)
    return model


def train(
    system_name: str, storage: torch.dtype, checkpointed: bool, folder: Path
) -> tuple[Record, set[torch.dtype]]:
    """The record, and dtypes of what was sharded of the quantized layers."""
    system = get_system(system_name)
    model = adapted(folder / system_name, storage)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.base_model.model.model.layers:
        system.fully_shard(layer, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    system.prepare(model)
    model.train()
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            seed = 100 * step + 10 * microbatch + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, WORDS, (2, 9), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss
            record.add("loss", loss)
            loss.backward()
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        record.add("logits", model(input_ids=ids).logits)
    dtypes = {p.dtype for n, p in model.named_parameters() if "mlp.up_proj" in n}
    return record.values, dtypes


@pytest.mark.parametrize(
    ("storage", "checkpointed"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.uint8, False)],
)
def test_adapters_on_four_bits_equal_fsdp2(pool_of, tmp_path, storage, checkpointed):
    """Stored as numbers of the adapters' dtype, as FSDP-QLoRA has them, or as the
    bytes that they are, which FSDP2 shards since torch 2.12."""
    pool = pool_of(2)
    stored = storage if VERSION >= (2, 12) else torch.bfloat16
    theirs = pool.run(train, "fsdp2", stored, checkpointed, tmp_path)
    ours = pool.run(train, "lowtide", storage, checkpointed, tmp_path)
    for (mine, dtypes), (other, there) in zip(ours, theirs, strict=True):
        assert (dtypes, there) == ({storage}, {stored})
        if storage != stored:
            mine = as_stored(mine, stored)
        assert_same_records(mine, other)


def as_stored(record: Record, dtype: torch.dtype) -> Record:
    """Its bytes as columns of ``dtype``, all else as it is."""
    return [
        (name, value)
        if value is None or value.dtype != torch.uint8
        else (name, value.view(-1).view(dtype).view(-1, 1))
        for name, value in record
    ]
