"""transformers' Trainer trains, saves and resumes with lowtide as with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import accelerate_on_cpus
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records

STEPS = 4
SAVED_AT = 2


def model_of(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def trainer_of(system: str, model: Any, folder: Path, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from lowtide.integrations.accelerate import use_lowtide

    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 64, (64, 12), generator=generator)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder),
            use_cpu=True,
            max_steps=STEPS,
            save_steps=SAVED_AT,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch",
            fsdp="full_shard auto_wrap",
            fsdp_config={
                "version": 2,
                "reshard_after_forward": True,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "cpu_ram_efficient_loading": settings.pop("efficient", False),
            },
            **settings,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    if system == "lowtide":
        use_lowtide(trainer.accelerator)
    return trainer


def train(system: str, folder: Path, settings: dict[str, Any]) -> tuple[Record, bool]:
    """Four steps with a checkpoint after two, from which another model resumes."""
    import lowtide

    accelerate_on_cpus.accept_cpus()
    accelerate_on_cpus.as_torchrun(dist.get_rank(), dist.get_world_size())
    record = Recorder()
    for resume in (None, str(folder / f"checkpoint-{SAVED_AT}")):
        trainer = trainer_of(
            system, model_of(seed=0 if resume is None else 1), folder, **settings
        )
        trainer.train(resume_from_checkpoint=resume)
        record.add_model(trainer.model)
        for logged in trainer.state.log_history:
            for name in ("loss", "grad_norm"):
                if name in logged:
                    record.add(name, torch.tensor(logged[name], dtype=torch.float64))
        for name, value in trainer.accelerator.get_state_dict(trainer.model).items():
            record.add(f"full {name}", value)
        layers = trainer.model.model.layers
        is_ours = all(isinstance(layer, lowtide.FSDPModule) for layer in layers)
        accelerate_on_cpus.forget()
    return record.values, is_ours


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Of its own: accelerate changes environment variables."""
    with RankPool(2) as ranks:
        yield ranks


CASES: dict[str, dict[str, Any]] = {
    "bf16, loaded on rank 0": {"bf16": True, "efficient": True},
    "fp32, checkpointed blocks": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("bf16, loaded on rank 0", marks=pytest.mark.slow),
        "fp32, checkpointed blocks",
    ],
)
def test_trains_saves_and_resumes_bit_equal_to_fsdp2(pool, tmp_path, case):
    theirs = pool.run(train, "fsdp2", tmp_path / "fsdp2", CASES[case])
    ours = pool.run(train, "lowtide", tmp_path / "lowtide", CASES[case])
    for (mine, own), (other, foreign) in zip(ours, theirs, strict=True):
        assert own and not foreign
        names = [name for name, _ in mine]
        assert names.count("loss") == names.count("grad_norm") == 2 * STEPS
        assert_same_records(mine, other)
    norms = [value.item() for name, value in ours[0][0] if name == "grad_norm"]
    assert len(set(norms)) == STEPS and min(norms) > 0.5  # clipping acts
    assert norms[:STEPS] == norms[STEPS:]  # what resumed went the same way
