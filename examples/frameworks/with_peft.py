"""LoRA of peft's on a model of transformers':
``torchrun ... [-m lowtide run] with_peft.py FOLDER``

The model's weights are frozen in bf16, the adapters trained in fp32; they are saved
after four steps, and four more follow from what was saved.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from bits import digest, say
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

ADAPTERS = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    torch.manual_seed(seed)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(base, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.base_model.model.model.layers:
        # FSDP2 takes one dtype a unit: the adapters are units of their own.
        for module in layer.modules():
            if hasattr(module, "lora_A"):
                fully_shard(module.lora_A["default"], mp_policy=policy)
                fully_shard(module.lora_B["default"], mp_policy=policy)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(4):
        tokens = torch.randint(0, 128, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor().item()
        say("loss", loss.item(), "norm", norm)


def main(folder: str) -> None:
    dist.init_process_group()
    model, optimizer = make(seed=1)
    train(model, optimizer, seed=0)
    saved = get_state_dict(model, optimizer, options=ADAPTERS)
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(saved, f"{folder}/adapters.pt")
    dist.barrier()
    model, optimizer = make(seed=2)
    weights, state = torch.load(f"{folder}/adapters.pt", weights_only=True)
    options = StateDictOptions(
        full_state_dict=True, ignore_frozen_params=True, strict=False
    )
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=state,
        options=options,
    )
    train(model, optimizer, seed=100)
    say("parameters", digest(model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
