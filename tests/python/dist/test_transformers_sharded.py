"""transformers' own sharding, from its 5.24 on (``DistributedConfig``), with lowtide as
with FSDP2: models are sharded without storage, loaded, tied, trained and saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.integrations import bind
from support import accelerate_on_cpus
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system
from support.transformers_versions import SHARDS, SHARDS_NOT

pytestmark = pytest.mark.skipif(not SHARDS, reason=SHARDS_NOT)

STEPS = 3
WORDS = 64


def start(folder: Path, tied: bool) -> None:
    """A model that every rank may load."""
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerate_on_cpus.as_torchrun(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()


def load(folder: Path, replicas: int = 1) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(
            fsdp_size=dist.get_world_size() // replicas,
            dp_replicate_size=replicas,
            fsdp_mixed_precision=True,
        ),
        dtype=torch.float32,
    )


def bound(system: str) -> contextlib.AbstractContextManager[Any]:
    return bind() if system == "lowtide" else contextlib.nullcontext()


def is_lowtides(model: Any) -> bool:
    units = [model, *model.model.layers, model.model.norm]
    return all(isinstance(unit, lowtide.FSDPModule) for unit in units)


def text(seed: int, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (rows, 9), generator=generator)


def train(record: Recorder, model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            ids = text(100 * step + 10 * microbatch + dist.get_rank())
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            record.add("loss", loss)
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()
    record.add_model(model)


def whole(record: Recorder, model: Any, folder: Path) -> None:
    """Its text, and what its files are to who loads them without ranks."""
    from transformers import LlamaForCausalLM

    model.eval()
    record.add("text", model.generate(text(7)[:, :4], max_new_tokens=5))
    model.save_pretrained(folder / "saved")
    dist.barrier()
    for name, value in LlamaForCausalLM.from_pretrained(
        folder / "saved"
    ).named_parameters():
        record.add(f"saved {name}", value)


def in_a_loop(system: str, folder: Path, replicas: int) -> tuple[Record, bool]:
    start(folder, tied=False)
    record = Recorder()
    with bound(system):
        model = load(folder, replicas)
        train(record, model)
        whole(record, model, folder)
    return record.values, is_lowtides(model)


@pytest.mark.parametrize(
    ("ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_trains_in_a_loop_with_the_bits_of_fsdp2(pool_of, tmp_path, ranks, replicas):
    pool = pool_of(ranks)
    theirs = pool.run(in_a_loop, "fsdp2", tmp_path / "fsdp2", replicas)
    ours = pool.run(in_a_loop, "lowtide", tmp_path / "lowtide", replicas)
    for (mine, own), (other, foreign) in zip(ours, theirs, strict=True):
        assert own and not foreign
        assert_same_records(mine, other)


def tied_over_units(folder: Path) -> tuple[Record, list[bool]]:
    """The embedding is sharded with the last norm and kept, the head with the root."""
    start(folder, tied=True)
    record = Recorder()
    with bind():
        model = load(folder)
        facts = [model.lm_head.weight is model.model.embed_tokens.weight]
        train(record, model)
        whole(record, model, folder)
    facts.append(model.lm_head.weight is model.model.embed_tokens.weight)
    return record.values, [*facts, is_lowtides(model)]


def tied_in_the_root(folder: Path) -> Record:
    from transformers import LlamaForCausalLM

    start(folder, tied=True)
    system = get_system("fsdp2")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        system.fully_shard(layer, mp_policy=policy)
    system.fully_shard(model.model.norm, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    record = Recorder()
    train(record, model)
    return record.values


def test_a_weight_that_is_tied_when_it_is_loaded_is_one_weight(pool_of, tmp_path):
    """With the bits of FSDP2 where both modules are the root's; transformers' FSDP2
    reduces its gradient twice."""
    theirs = pool_of(2).run(tied_in_the_root, tmp_path / "fsdp2")
    ours = pool_of(2).run(tied_over_units, tmp_path / "lowtide")
    for (mine, facts), other in zip(ours, theirs, strict=True):
        assert facts == [True] * 3
        assert_same_records(mine[: len(other)], other)
        trained = dict(other)["model.embed_tokens.weight"]
        assert len(mine) > len(other) and trained is not None


def by_trainer(system: str, folder: Path) -> tuple[Record, bool]:
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    start(folder, tied=False)
    record = Recorder()
    rows = [{"input_ids": row, "labels": row} for row in text(3, rows=32)]
    with bound(system):
        trainer = Trainer(
            load(folder),
            TrainingArguments(
                str(folder / "trained"),
                use_cpu=True,
                max_steps=4,
                save_steps=2,
                save_only_model=True,
                eval_strategy="steps",
                eval_steps=2,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                max_grad_norm=0.5,
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            eval_dataset=rows[:8],
        )
        record.add("before", torch.tensor(trainer.evaluate()["eval_loss"]))
        trainer.train()
    for logged in trainer.state.log_history:
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in logged:
                record.add(name, torch.tensor(logged[name], dtype=torch.float64))
    record.add_model(trainer.model)
    dist.barrier()
    saved = LlamaForCausalLM.from_pretrained(folder / "trained/checkpoint-2")
    for name, value in saved.named_parameters():
        record.add(f"saved {name}", value)
    accelerate_on_cpus.forget()
    return record.values, is_lowtides(trainer.model)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Of its own: accelerate changes environment variables."""
    with RankPool(2) as ranks:
        yield ranks


def test_trains_by_the_trainer_with_the_bits_of_fsdp2(pool, tmp_path):
    theirs = pool.run(by_trainer, "fsdp2", tmp_path / "fsdp2")
    ours = pool.run(by_trainer, "lowtide", tmp_path / "lowtide")
    for (mine, own), (other, foreign) in zip(ours, theirs, strict=True):
        assert own and not foreign
        names = [name for name, _ in mine]
        assert [names.count(n) for n in ("loss", "grad_norm", "eval_loss")] == [4, 4, 2]
        assert_same_records(mine, other)
