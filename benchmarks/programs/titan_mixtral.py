"""Mixtral-8x7B of torchtitan 0.3's parts, which has no Mixtral: its blocks of Qwen3 in
Mixtral's sizes, without norms of queries and keys. For titan_configured.py."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.qwen3 import (
    _EMBEDDING_INIT,
    _LINEAR_INIT,
    _build_qwen3_moe_layers,
    _qwen3_norm,
)
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b

VOCABULARY, DIM, HEAD = 32000, 4096, 128


def mixtral_8x7b() -> Any:
    """torchtitan's configuration of Qwen3-30B-A3B around it, one sequence a rank."""
    config = qwen3_30b_a3b()
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    model.dim, model.vocab_size = DIM, VOCABULARY
    model.norm = _qwen3_norm(DIM)
    model.tok_embeddings = Embedding.Config(
        num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=_EMBEDDING_INIT
    )
    model.lm_head = Linear.Config(
        in_features=DIM, out_features=VOCABULARY, param_init=_LINEAR_INIT
    )
    model.layers = _build_qwen3_moe_layers(
        n_layers=32,
        dim=DIM,
        n_heads=32,
        n_kv_heads=8,
        head_dim=HEAD,
        moe_hidden_dim=14336,
        num_experts=8,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=HEAD, max_seq_len=32768, theta=1e6),
    )
    for layer in model.layers:
        layer.attention.qk_norm = None
    config.loss.loss_fn.global_vocab_size = VOCABULARY
    config.training.local_batch_size = 1
    return config
