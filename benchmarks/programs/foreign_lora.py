"""LoRA of peft, r 16 in every matrix, on a Llama as large as Llama-3-8B in bf16, by
transformers' Trainer: one sequence of 2,048 tokens, checkpointed."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TOKENS = 2048
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
lora = LoraConfig(
    r=16, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM"
)
data = [dict.fromkeys(("input_ids", "labels"), torch.arange(TOKENS)) for _ in range(8)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        max_steps=3,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(get_peft_model(model, lora), arguments, train_dataset=data).train()
