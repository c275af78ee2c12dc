"""LoRA as others measured it on real GPUs: their layers, our loops after their
descriptions (published.py runs them)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from published_support import check_out, peaks, use_packages


def litgpt(model: str, batch: int, tokens: int) -> dict[str, int]:
    """LoRA of rank 8 on queries and values in bfloat16, 128 samples an optimizer step;
    the first batch has the data's longest text, ``tokens``, the others 256."""
    use_packages()
    with tempfile.TemporaryDirectory() as folder:
        check_out("litgpt", "8641822", "lit_gpt", into=Path(folder))
        sys.path.insert(0, folder)
        _train_litgpt(model, batch, tokens)
    return peaks()


def _train_litgpt(model: str, batch: int, tokens: int) -> None:
    import lightning
    from lit_gpt import lora, utils

    fabric = lightning.Fabric(devices=1, precision="bf16-true")
    fabric.launch()
    config = lora.Config.from_name(
        name=model, r=8, alpha=16, dropout=0.05, to_query=True, to_value=True
    )
    with fabric.init_module(empty_init=False):
        network: Any = lora.GPT(config)
    lora.mark_only_lora_as_trainable(network)
    network = fabric.setup_module(network)
    trainable = [p for p in network.parameters() if p.requires_grad]
    steps = fabric.setup_optimizers(
        torch.optim.AdamW(trainable, lr=3e-4, weight_decay=0.01)
    )
    network.max_seq_length = tokens
    of_step = 128 // batch
    for index in range(2 * of_step):
        length = tokens if index == 0 else 256
        ids = torch.randint(0, 1000, (batch, length), device="cpu").pin_memory()
        inputs, targets = fabric.to_device((ids, ids.clone().pin_memory()))
        logits = network(inputs, lm_head_chunk_size=128)
        logits[-1] = logits[-1][..., :-1, :]
        loss = utils.chunked_cross_entropy(logits, targets[..., 1:])
        fabric.backward(loss / of_step)
        if (index + 1) % of_step == 0:
            steps.step()
            steps.zero_grad()
        loss.item()


def peft(
    tokens: int, method: str = "lora", rank: int = 32, targets: str = "", dora: int = 0
) -> dict[str, int]:
    """Llama-3.2-3B in bfloat16 with adapters in fp32, batches of 4: one of ``tokens``
    comes right after the cache was emptied, as the longest of each twenty does; the
    others have 200."""
    use_packages()
    import peft
    import transformers

    torch.nn.Linear(1, 1).to("cuda")
    before = torch.cuda.max_memory_reserved()
    network: Any = _llama_3_2_3b()
    if method == "lora":
        config: Any = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=64,
            lora_dropout=0.0,
            target_modules=targets.split(",") if targets else None,
            use_dora=bool(dora),
        )
    else:
        config = peft.LNTuningConfig(task_type="CAUSAL_LM")
    network = peft.get_peft_model(network, config)
    steps = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.1)
    schedule = transformers.get_cosine_schedule_with_warmup(steps, 500, 5000)
    network.train()
    torch.cuda.empty_cache()
    for index in range(20):
        longest = tokens if index == 10 else 200
        batch = _padded([longest - shorter for shorter in range(4)])
        present = batch["attention_mask"].sum().item()
        steps.zero_grad()
        loss = network(**batch, num_items_in_batch=present).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        steps.step()
        schedule.step()
        loss.item()
        if index % 10 == 9:
            torch.cuda.empty_cache()
    found = peaks()
    return found | {"max_reserved": found["max_reserved"] - before}


def _llama_3_2_3b() -> Any:
    """With no weights of anybody's: its shapes are its configuration's."""
    import transformers

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
    )
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
    network.to_empty(device="cuda")
    network.tie_weights()
    return network


def _padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Each text behind its end is masked, and but for one token not in the loss."""
    ids = torch.randint(0, 1000, (len(lengths), max(lengths)))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    batch = {"input_ids": ids.to("cuda"), "attention_mask": mask.to("cuda")}
    labels = batch["input_ids"].clone()
    for row, length in enumerate(lengths):
        labels[row, length + 1 :] = -100
    return batch | {"labels": labels}
