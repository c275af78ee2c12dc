"""A network of experts of transformers, its own configuration, sharded by FSDP2 as
torch's tutorial does: on meta first, a unit a layer, bf16 with fp32 reductions,
checkpoints. Fewer experts than ranks are split within each, as torchtitan does.

foreign_experts.py qwen3|mixtral
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TOKENS = 4096


def qwen3() -> torch.nn.Module:
    """Qwen3-30B-A3B."""
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
    return Qwen3MoeForCausalLM(config)


def mixtral() -> torch.nn.Module:
    """Mixtral-8x7B, which is the configuration's default."""
    return MixtralForCausalLM(MixtralConfig(use_cache=False))


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
with torch.device("meta"):
    model = {"qwen3": qwen3, "mixtral": mixtral}[sys.argv[1]]()
model.gradient_checkpointing_enable({"use_reentrant": False})


def placement(parameter: torch.nn.Parameter) -> Shard | None:
    few = parameter.dim() == 3 and parameter.shape[0] < dist.get_world_size()
    return Shard(1) if few else None


settings = {
    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "shard_placement_fn": placement,
}
for layer in model.model.layers:
    fully_shard(layer, **settings)
fully_shard(model, **settings)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS), device="cuda")
    model(tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
