"""Tiny random models of other libraries, one step's loss, and their units by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 96
SEQ = 6
BATCH = 2


@dataclass(frozen=True)
class TinyModel:
    """`units`: what a careful user would pass to fully_shard, before the model."""

    build: Callable[[], Any]
    loss: Callable[[Any, torch.Generator], torch.Tensor]
    units: tuple[str, ...]


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)


def causal_loss(model: Any, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def masked_loss(model: Any, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    return model(input_ids=ids, labels=ids).loss


def translation_loss(model: Any, generator: torch.Generator) -> torch.Tensor:
    source, target = tokens(generator), tokens(generator)
    return model(input_ids=source, labels=target, use_cache=False).loss


def image_loss(size: int) -> Callable[[Any, torch.Generator], torch.Tensor]:
    def loss(model: Any, generator: torch.Generator) -> torch.Tensor:
        images = torch.randn(BATCH, 3, size, size, generator=generator)
        out = model(images)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return F.cross_entropy(logits, torch.arange(BATCH))

    return loss


def series_loss(model: Any, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "attn_implementation": "eager",
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=False))


def qwen3_tied() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **DECODER, num_local_experts=4, num_experts_per_tok=1, tie_word_embeddings=False
    )
    return MixtralForCausalLM(config)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        vocab_size=VOCAB,
        attn_implementation="eager",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16,
        d_kv=8,
        num_heads=2,
        d_ff=24,
        num_layers=2,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return T5ForConditionalGeneration(config)


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        vocab_size=VOCAB,
        attn_implementation="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        num_labels=5,
        attn_implementation="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def resnet() -> Any:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [2, 1, 1, 2], num_classes=5, width_per_group=64)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def layers(path: str, count: int = 2) -> tuple[str, ...]:
    return tuple(f"{path}.{i}" for i in range(count))


DECODER_UNITS = ("model.embed_tokens", *layers("model.layers"), "lm_head")

MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(llama, causal_loss, DECODER_UNITS),
    "qwen3_tied": TinyModel(qwen3_tied, causal_loss, layers("model.layers")),
    "gpt2": TinyModel(gpt2, causal_loss, layers("transformer.h")),
    "t5": TinyModel(
        t5, translation_loss, (*layers("encoder.block"), *layers("decoder.block"))
    ),
    "mixtral": TinyModel(mixtral, causal_loss, DECODER_UNITS),
    "bert": TinyModel(bert, masked_loss, layers("bert.encoder.layer")),
    "vit": TinyModel(vit, image_loss(16), layers("vit.layers")),
    "resnet": TinyModel(resnet, image_loss(32), (*layers("layer1"), *layers("layer4"))),
    "lstm": TinyModel(LSTM, series_loss, ("embed", "head")),
}
