"""transformers' Trainer, FSDP version 2:
``torchrun ... [-m lowtide run] with_transformers.py FOLDER``

Six steps with a checkpoint after three, from which another trainer goes on.
"""

import sys

import torch
from bits import digest, say
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make(folder: str, seed: int) -> Trainer:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 128, (64, 17), generator=generator)
    return Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            folder,
            use_cpu=not torch.accelerator.is_available(),
            bf16=True,
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            fsdp="full_shard auto_wrap",
            fsdp_config={
                "version": 2,
                "reshard_after_forward": True,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "cpu_ram_efficient_loading": True,
            },
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )


def main(folder: str) -> None:
    for resumed in (None, f"{folder}/checkpoint-3"):
        trainer = make(folder, seed=0 if resumed is None else 1)
        trainer.train(resume_from_checkpoint=resumed)
        for logged in trainer.state.log_history:
            if "loss" in logged:
                say("loss", logged["loss"], "norm", logged["grad_norm"])
        say("parameters", digest(trainer.model.parameters()))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
