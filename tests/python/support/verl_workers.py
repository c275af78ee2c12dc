"""Workers of verl's with a small model in an FSDP2 engine, and what they train on."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support import verl_on_cpus

WORDS, SAMPLES = 64, 4
LAYER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def save_model(path: Path, tied: bool = False, experts: int = 0) -> None:
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    if experts:
        config = Qwen3MoeConfig(
            **LAYER,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=experts,
            num_experts_per_tok=2,
        )
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    else:
        config = Qwen2Config(**LAYER, tie_word_embeddings=tied)
        Qwen2ForCausalLM(config).save_pretrained(path)


def make_worker(path: Path, **settings: Any) -> Any:
    """``settings``: of its engine, others of its model."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    about_model, of_model = (
        {name: settings.pop(name) for name in names if name in settings}
        for names in (
            ("tied", "experts"),
            ("lora_rank", "lora", "external_lib", "enable_activation_offload"),
        )
    )
    if dist.get_rank() == 0:
        save_model(path, **about_model)
    dist.barrier()
    in_parallel = settings.get("ulysses_sequence_parallel_size", 1) > 1
    attention = verl_on_cpus.packed_attention() if in_parallel else "sdpa"
    model = HFModelConfig(
        path=str(path),
        load_tokenizer=False,
        override_config={"attn_implementation": attention},
        use_remove_padding=in_parallel,
        **of_model,
    )
    defaults = {"strategy": "fsdp2", "use_no_sync_for_gradient_accumulation": False}
    engine = FSDPEngineConfig(
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=2,
        **(defaults | settings),
    )
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, clip_grad=0.5, total_training_steps=8, lr_scheduler_type="cosine"
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "optimizer", "extra", "hf_model"]
        ),
    )
    worker = TrainingWorker(config)
    worker.set_loss_fn(functools.partial(sft_loss, config=None))
    worker.reset()
    return worker


def samples(seed: int) -> Any:
    """Texts of 6 to 12 words, whose first three are the prompt."""
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 13, (SAMPLES,), generator=generator).tolist()
    tokens = [torch.randint(0, WORDS, (n,), generator=generator) for n in lengths]

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(n) for n in lengths]),
            "loss_mask": nested([(torch.arange(n) > 2).long() for n in lengths]),
        },
        {"temperature": 1.0, "pad_mode": "no_padding", "global_batch_size": SAMPLES},
    )
