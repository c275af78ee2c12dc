"""torchtitan's trainer with lowtide's `parallelize_fn`, beside its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide._torch_version import STORES_ANNOTATED
from support import titan_on_cpus
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

STEPS = 4


def unchanged(theirs: Any) -> Any:
    """But for the order in which three ranks and more add."""

    def parallelize(*args: Any, **settings: Any) -> Any:
        model = theirs(*args, **settings)
        get_system("fsdp2").prepare(model)
        return model

    return parallelize


def train(
    system: str, folder: Path, steps: int, settings: dict[str, Any]
) -> tuple[Record, dict[str, str], bool]:
    """Up to step ``steps``, from the checkpoint that is there, to another."""
    import lowtide
    from lowtide.integrations.torchtitan import parallelize_fn

    change = parallelize_fn if system == "lowtide" else unchanged
    record = Recorder()
    trainer = titan_on_cpus.trainer_of(change, folder / system, steps, **settings)
    trainer.train()
    for loss, norm in trainer.metrics_processor.logged:
        record.add("loss", torch.tensor(loss, dtype=torch.float64))
        record.add("norm", torch.tensor(norm, dtype=torch.float64))
    (model,) = trainer.model_parts
    record.add_model(model)
    placements = {n: str(p.placements) for n, p in model.named_parameters()}
    blocks = [model, *model.layers.values()]
    is_ours = [isinstance(block, lowtide.FSDPModule) for block in blocks]
    trainer.close()
    return record.values, placements, all(is_ours)


def assert_equal(ranks: int, folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Placements of the parameters, by name."""
    if not STORES_ANNOTATED:  # FSDP2 reads freed memory behind a loss by chunks
        settings = settings | {"whole_logits": True}
    for steps in (STEPS // 2, STEPS):
        # Pools of their own: torchtitan counts a process's blocks over its trainers
        # (0.2), and FSDP2 refuses a second trainer's mesh (0.3).
        with RankPool(ranks) as pool:
            theirs = pool.run(train, "fsdp2", folder, steps, settings)
        with RankPool(ranks) as pool:
            ours = pool.run(train, "lowtide", folder, steps, settings)
        for (mine, here, own), (other, there, foreign) in zip(
            ours, theirs, strict=True
        ):
            assert own and not foreign and here == there
            assert sum(name == "loss" for name, _ in mine) == STEPS // 2
            assert_same_records(mine, other)
    return ours[0][1]


def test_trains_and_resumes_bit_equal_to_fsdp2(tmp_path):
    assert_equal(2, tmp_path, {"checkpointing": "full"})


@pytest.mark.skipif(
    STORES_ANNOTATED or not titan_on_cpus.HAS_CONFIGS,
    reason="FSDP2 has what torchtitan 0.3 wants by default from torch 2.15 on",
)
def test_its_default_trains_where_fsdp2_refuses_it(tmp_path):
    records = []
    for backend in ("partial_dtensor", "spmd_types"):
        with RankPool(2) as pool:
            settings = {"spmd_backend": backend, "saves": False}
            found = pool.run(train, "lowtide", tmp_path / backend, STEPS, settings)
        records.append(found)
    for (plain, *_), (default, *_) in zip(*records, strict=True):
        assert_same_records(default, plain)


ON_FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_parallel_degree": 2},
    "context parallel": {
        "context_parallel_degree": 2,
        "data_parallel_shard_degree": 2,
    },
    "shards on the host": {"offloaded": True},
    "replicated shards": {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 2,
    },
    "experts on a mesh of their own": {
        **{"model": "deepseek_v3", "experts": 4, "expert_parallel_degree": 2},
        "data_parallel_shard_degree": 4,
    },
    "experts fewer than ranks": {
        **{"model": "deepseek_v3", "experts": 2, "expert_parallel_degree": 2},
        "data_parallel_shard_degree": 4,
    },
    "pipeline": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_schedule": "1F1B",
    },
}


# Of torchtitan from 0.3 on.
NOT_ON_CPUS = {
    "context parallel": "with FlexAttention alone, which trains on accelerators",
    "experts on a mesh of their own": "a ShardPlacementResult for each parameter",
    "experts fewer than ranks": "a ShardPlacementResult for each parameter",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR_RANKS)
def test_other_parallelism_beside_it(tmp_path, case):
    if titan_on_cpus.HAS_CONFIGS and case in NOT_ON_CPUS:
        pytest.skip(f"torchtitan {titan_on_cpus.VERSION}: {NOT_ON_CPUS[case]}")
    settings = ON_FOUR_RANKS[case] | {"checkpointing": "selective"}
    placements = assert_equal(4, tmp_path, settings)
    by_columns = [n for n, where in placements.items() if "Shard(dim=1)" in where]
    if case.startswith("experts"):
        experts = [name for name in placements if ".experts." in name]
        assert by_columns == (experts if case == "experts fewer than ranks" else [])


@pytest.mark.skipif(titan_on_cpus.HAS_CONFIGS, reason="0.3 shards over one rank, too")
def test_a_model_that_is_not_sharded_is_refused(tmp_path):
    with RankPool(1) as pool:
        (outcome,) = pool.outcomes(train_unsharded, tmp_path)
    assert outcome.error.startswith(
        "lowtide: integrations.torchtitan: expected parallelize_llama to shard "
        "Transformer, got it without a unit. Ask for "
    )


def train_unsharded(folder: Path) -> None:
    from lowtide.integrations.torchtitan import parallelize_fn

    titan_on_cpus.trainer_of(parallelize_fn, folder, 1)


def deferred(theirs: Any) -> Any:
    """lowtide's, and the logits of the last layer not made before the loss."""
    from lowtide.integrations.torchtitan import parallelize_fn
    from lowtide.losses import defer_logits

    def parallelize(*args: Any, **settings: Any) -> Any:
        model = parallelize_fn(theirs)(*args, **settings)
        defer_logits(model.lm_head if titan_on_cpus.HAS_CONFIGS else model.output)
        return model

    return parallelize


def losses(
    defer: bool, folder: Path, compiled: bool
) -> tuple[list[tuple[float, float]], int]:
    """Losses and norms by step; how many steps' logits were never made."""
    from lowtide.integrations.torchtitan import parallelize_fn
    from lowtide.losses._deferred_logits import DeferredLogits

    change = deferred if defer else parallelize_fn
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "lowtide: deferred logits")
        settings: dict[str, Any] = {"compiled": compiled, "whole_logits": True}
        if titan_on_cpus.HAS_CONFIGS:  # else its own wrapper calls the head
            settings["spmd_backend"] = "partial_dtensor"
        trainer = titan_on_cpus.trainer_of(change, folder, STEPS, **settings)
        outputs: list[type] = []
        (model,) = trainer.model_parts
        model.register_forward_hook(lambda *call: outputs.append(type(call[2])))
        trainer.train()
    trainer.close()
    return trainer.metrics_processor.logged, outputs.count(DeferredLogits)


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, id="eager"),
        pytest.param(True, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_its_loss_needs_no_logits(tmp_path, compiled):
    """Compiled, it compiles the loss, too."""
    with RankPool(2) as pool:
        plain = pool.run(losses, False, tmp_path / "plain", compiled)
        ours = pool.run(losses, True, tmp_path / "deferred", compiled)
    for (mine, count), (wanted, none) in zip(ours, plain, strict=True):
        assert (count, none) == (STEPS, 0)
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(wanted))
