"""A small GPT-2 of transformers, with its dropouts: code that nobody edited for us."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

LAYERS, WIDTH, VOCAB, BATCH, SEQUENCE = 3, 32, 101, 2, 12
# Of what a block receives, fp32.
RESIDUAL_BYTES = 4 * BATCH * SEQUENCE * WIDTH


def build() -> GPT2LMHeadModel:
    """The same weights every time."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=SEQUENCE,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        use_cache=False,
    )
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
    return GPT2LMHeadModel(config).train()


def loss_of(model: GPT2LMHeadModel, step: int, rank: int = 0) -> Tensor:
    """Dropout and tokens follow from the arguments; bf16 autocast."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    torch.manual_seed(100 * step + rank)
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss
