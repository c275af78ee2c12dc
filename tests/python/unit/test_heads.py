"""Which layer makes the logits: models of others, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lowtide.losses._heads import NoHead, find_head

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
# As wide as GPT-2 medium's: a position a feature.
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
OF_TRANSFORMERS: dict[str, tuple[Any, Any, str]] = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(vocab_size=64, **SMALL, **HEADS),
        "lm_head",
    ),
    "gpt2, tied": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(vocab_size=64, **GPT2),
        "lm_head",
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(vocab_size=64, **T5),
        "lm_head",
    ),
    "bert": (
        transformers.BertForMaskedLM,
        transformers.BertConfig(vocab_size=64, **SMALL, num_attention_heads=2),
        "cls.predictions.decoder",
    ),
    "experts": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(vocab_size=64, **SMALL, **HEADS),
        "lm_head",
    ),
}


@pytest.mark.parametrize("model", OF_TRANSFORMERS)
def test_heads_of_transformers(model):
    make, config, expected = OF_TRANSFORMERS[model]
    with torch.device("meta"):
        made = make(config)
    name, head = find_head(made)
    assert (name, head.out_features) == (expected, 64)


class GPT(nn.Module):
    """As nanoGPT names and ties it, with as many positions as features."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(64, 16),
                "wpe": nn.Embedding(16, 16),
                "h": nn.ModuleList(blocks),
            }
        )
        self.lm_head = nn.Linear(16, 64, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self) -> None: ...


def test_a_tied_head_beside_positions():
    assert find_head(GPT())[0] == "lm_head"
    assert find_head(GPT(), "transformer.h.1.0")[0] == "transformer.h.1.0"


def test_what_has_none():
    config = transformers.ViTConfig(**SMALL, num_attention_heads=2)
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
    with pytest.raises(NoHead, match="ViTForImageClassification, got none"):
        find_head(model)
