"""Qwen3-30B-A3B of transformers, its own configuration, sharded by FSDP2 as torch's
tutorial does: on meta first, a unit a layer, bf16 with fp32 reductions, checkpoints."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

TOKENS = 4096

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
config = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    use_cache=False,
)
with torch.device("meta"):
    model = Qwen3MoeForCausalLM(config)
model.gradient_checkpointing_enable({"use_reentrant": False})
precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=precision)
fully_shard(model, mp_policy=precision)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS), device="cuda")
    model(tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
