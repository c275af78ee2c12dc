"""verl's SFT trainer with its FSDP2 engine:
``torchrun ... [-m lowtide run] with_verl.py FOLDER``

Four steps of microbatches, a checkpoint in FOLDER, and four more of another trainer
that resumes; then what its engine would hand to the rollouts.
"""

import sys
from pathlib import Path

import torch
from bits import digest, say
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer, models
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl.trainer import sft_trainer
from verl.utils.device import get_device_name
from verl.utils.distributed import (
    destroy_global_process_group,
    initialize_global_process_group,
)

WORDS = 64


class Texts(Dataset):
    """Of 8 to 16 words; the first four are the prompt."""

    def __init__(self, **settings) -> None: ...

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(8, 17, (), generator=generator))
        return {
            "input_ids": torch.randint(0, WORDS, (length,), generator=generator),
            "position_ids": torch.arange(length),
            "loss_mask": (torch.arange(length) >= 4).long(),
        }


class Printed:
    """In the place of its loggers."""

    def __init__(self, **settings) -> None: ...

    def log(self, data: dict[str, float], step: int) -> None:
        if "val/loss" in data:
            say("step", step, "validated", data["val/loss"])
        else:
            loss, norm = data["train/loss"], data["train/grad_norm"]
            say("step", step, "loss", loss, "norm", norm)


def save_model(folder: Path) -> None:
    """With random weights, as transformers saves one."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1"
    ).save_pretrained(folder)


def main(folder: Path) -> None:
    rank = initialize_global_process_group()[1]
    if rank == 0:
        save_model(folder / "model")
    torch.distributed.barrier()
    sft_trainer.Tracking = Printed
    for steps in (4, 8):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "sft_trainer_engine",
                [
                    f"model.path={folder}/model",
                    "+model.override_config.attn_implementation=sdpa",
                    "model.use_remove_padding=false",
                    "engine.strategy=fsdp2",
                    "engine.use_torch_compile=false",
                    "optim.lr=1e-2",
                    "optim.clip_grad=0.5",
                    f"data.custom_cls.path={__file__}",
                    "data.custom_cls.name=Texts",
                    "data.train_batch_size=4",
                    "data.micro_batch_size_per_gpu=1",
                    "data.use_dynamic_bsz=false",
                    "data.val_files=validation",
                    "data.num_workers=0",
                    f"trainer.default_local_dir={folder}/checkpoints",
                    "trainer.total_epochs=1",
                    f"trainer.total_training_steps={steps}",
                    "trainer.save_freq=4",
                    "trainer.test_freq=4",
                    "trainer.logger=[]",
                    f"trainer.device={get_device_name()}",
                ],
            )
        trainer = sft_trainer.SFTTrainer(config)
        trainer.fit()
    weights, _ = trainer.engine.get_per_tensor_param()
    say("parameters", digest(weight for _, weight in weights))
    destroy_global_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
