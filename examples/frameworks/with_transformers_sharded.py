"""transformers' own sharding, from its 5.24 on: ``from_pretrained`` with a
``DistributedConfig``.
``torchrun ... [-m lowtide run] with_transformers_sharded.py FOLDER``

Six steps with a checkpoint after three, from which another model goes on.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from bits import digest, say
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import (
    load_optimizer_distributed,
    save_optimizer_distributed,
)

STEPS = 6
SAVED_AFTER = 3
MICROBATCHES = 2


def make(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def load(folder: str) -> tuple[Any, torch.optim.Optimizer]:
    """Every rank reads its rows."""
    model = LlamaForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(
            fsdp_size=dist.get_world_size(), fsdp_mixed_precision=True
        ),
        dtype=torch.float32,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    model.train()
    for step in range(first, end):
        losses = []
        for i in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(
                (step * MICROBATCHES + i) * dist.get_world_size() + dist.get_rank()
            )
            rows = torch.randint(0, 128, (2, 17), generator=generator).to(model.device)
            model.set_requires_gradient_sync(i == MICROBATCHES - 1)
            loss = model(input_ids=rows, labels=rows).loss / MICROBATCHES
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        say("loss", sum(losses), "norm", norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    say("parameters", digest(model.parameters()))


def main(folder: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group()
    if dist.get_rank() == 0:
        make(f"{folder}/start")
    dist.barrier()
    model, optimizer = load(f"{folder}/start")
    train(model, optimizer, 0, SAVED_AFTER)
    model.save_pretrained(f"{folder}/shards", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")
    train(model, optimizer, SAVED_AFTER, STEPS)

    again, optimizer = load(f"{folder}/shards")
    load_optimizer_distributed(again, optimizer, f"{folder}/optimizer")
    train(again, optimizer, SAVED_AFTER, STEPS)

    again.save_pretrained(f"{folder}/whole")  # files that any transformers loads
    again.eval()
    start = torch.arange(8, device=again.device).view(2, 4)
    text = again.generate(start, max_new_tokens=6, do_sample=False).tolist()
    if dist.get_rank() == 0:
        whole = LlamaForCausalLM.from_pretrained(f"{folder}/whole")
        say("parameters", digest(whole.parameters()), "text", text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
