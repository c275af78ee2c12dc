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


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def start(folder: Path, tied: bool, family: str = "llama") -> None:
    """A model that every rank may load."""
    from transformers import AutoConfig, AutoModelForCausalLM

    accelerate_on_cpus.as_torchrun(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            family,
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            **FAMILIES[family],
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()


def load(folder: Path, replicas: int = 1, **sizes: int) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(
            fsdp_size=dist.get_world_size() // (replicas * sizes.get("tp_size", 1)),
            dp_replicate_size=replicas,
            fsdp_mixed_precision=True,
            **sizes,
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


def train(record: Recorder, model: Any, tp_size: int = 1, late: bool = True) -> None:
    """``late``: a step's gradients are reduced behind its last microbatch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1 or not late)
            ids = text(100 * step + 10 * microbatch + dist.get_rank() // tp_size)
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            record.add("loss", loss)
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()
    record.add_model(model)


def whole(record: Recorder, model: Any, folder: Path) -> None:
    """Its text, and what its files are to who loads them without ranks."""
    from transformers import AutoModelForCausalLM

    model.eval()
    record.add("text", model.generate(text(7)[:, :4], max_new_tokens=5))
    model.save_pretrained(folder / "saved")
    dist.barrier()
    for name, value in AutoModelForCausalLM.from_pretrained(
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


def in_parallel(
    system: str, folder: Path, family: str, sizes: dict[str, int], late: bool
) -> tuple[Record, dict[str, str]]:
    """The record, and how each parameter is placed."""
    start(folder, tied=False, family=family)
    record = Recorder()
    with bound(system):
        model = load(folder, **sizes)
        train(record, model, sizes.get("tp_size", 1), late)
        whole(record, model, folder)
    assert is_lowtides(model) == (system == "lowtide")
    return record.values, {n: str(p.placements) for n, p in model.named_parameters()}


# The heads of Qwen3 have norms of their own, whose gradients a hook on the gathered
# parameter sums. Behind microbatches without sync it sees their sum with FSDP2.
IN_PARALLEL: dict[str, tuple[str, dict[str, int], bool]] = {
    "tensor": ("llama", {"tp_size": 2}, True),
    "tensor, replicas": ("llama", {"tp_size": 2, "replicas": 2}, True),
    "tensor, norms of heads": ("qwen3", {"tp_size": 2}, False),
    "tensor, experts": ("mixtral", {"tp_size": 2}, True),
    "experts": ("mixtral", {"ep_size": 2}, True),
    "experts of each rank": ("mixtral", {"ep_size": 4}, True),
    "experts, replicas": ("mixtral", {"ep_size": 2, "replicas": 2}, True),
    "tensor, experts of each rank": ("mixtral", {"tp_size": 2, "ep_size": 4}, True),
}
QUICK = ("tensor, norms of heads", "tensor, experts of each rank")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow)
        for c in IN_PARALLEL
    ],
)
def test_trains_beside_tensor_and_expert_parallelism(pool_of, tmp_path, case):
    pool = pool_of(4)
    theirs = pool.run(in_parallel, "fsdp2", tmp_path / "fsdp2", *IN_PARALLEL[case])
    ours = pool.run(in_parallel, "lowtide", tmp_path / "lowtide", *IN_PARALLEL[case])
    for (mine, places), (other, there) in zip(ours, theirs, strict=True):
        assert places == there
        assert_same_records(mine, other)
    strided = "_StridedShard(dim=0, sf=2), Shard(dim=0)"
    query = "model.layers.0.self_attn.q_proj.weight"
    assert (strided in places[query]) == ("tensor" in case)


def test_norms_of_heads_count_each_microbatch_once(pool_of, tmp_path):
    """FSDP2 hands their hook the sum of a step's microbatches, the first of which it
    has summed over ranks already."""
    pool = pool_of(4)
    (apart, _), (late, _) = (
        pool.run(
            in_parallel, "lowtide", tmp_path / str(late), "qwen3", {"tp_size": 2}, late
        )[0]
        for late in (False, True)
    )
    for name in ("q_norm", "k_norm"):
        key = f"model.layers.0.self_attn.{name}.weight.grad"
        wanted, got = (next(v for n, v in r if n == key) for r in (apart, late))
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-5)


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
