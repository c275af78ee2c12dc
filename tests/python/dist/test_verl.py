"""verl's worker of an FSDP2 engine, unedited, between two generations: log
probabilities, minibatches of microbatches, weights handed to the rollouts, its
checkpoints; the bits of FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide.integrations import bind
from support import verl_on_cpus
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records
from support.verl_workers import make_worker, samples

pytestmark = pytest.mark.skipif(not verl_on_cpus.is_here(), reason=verl_on_cpus.MISSING)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced-once": {"use_no_sync_for_gradient_accumulation": True},
    "offload-policy": {"offload_policy": True},
    "moved": {"param_offload": True, "optimizer_offload": True},
    "prefetched": {"forward_prefetch": True, "reshard_after_forward": False},
    "replicas": {"fsdp_size": 1},
    "float32": {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"}},
    "reference": {"forward_only": True},
    "tied": {"tied": True},
    "experts": {"experts": 4},
    "adapters": {"lora_rank": 4},
    "adapters-bf16": {"lora_rank": 4, "model_dtype": "bf16"},
    "adapters-merged": {"lora_rank": 4, "lora": {"merge": True}},
    "sequence": {"ulysses_sequence_parallel_size": 2},
}


def handed_on(engine: Any, **how: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from engine.get_per_tensor_param(**how)[0]


def run_worker(system: str, settings: dict[str, Any], folder: Path) -> Record:
    verl_on_cpus.prepare()
    if system == "lowtide":
        with bind():
            return _run_worker(settings, folder)
    return _run_worker(settings, folder)


def _run_worker(settings: dict[str, Any], folder: Path) -> Record:
    from verl.utils import tensordict_utils

    record = Recorder()
    worker = make_worker(folder / "model", **settings)
    engine = worker.engine
    shared = settings.get("ulysses_sequence_parallel_size", 1) > 1

    def add(name: str, output: Any) -> None:
        if output is None:  # another rank of the sequence has it
            return
        metrics = tensordict_utils.get(output, "metrics")
        for key in ("loss", "grad_norm", "lr"):
            if key in metrics:
                record.add(f"{name} {key}", torch.tensor(metrics[key]).double())
        if "log_probs" in output.keys():
            record.add(f"{name} log_probs", output["log_probs"].values())

    def step(number: int, seed: int) -> None:
        data = samples(seed if shared else 2 * seed + dist.get_rank())
        inferred = data.copy()
        tensordict_utils.assign_non_tensor(inferred, compute_loss=False)
        add(f"{number} inferred", worker.infer_batch(inferred))
        if engine.optimizer is None:
            return
        for part in data.chunk(2):
            tensordict_utils.assign_non_tensor(part, update_lr_scheduler=True)
            add(f"{number} trained", worker.train_batch(part))
        for name, weight in handed_on(engine):
            record.add(f"{number} handed on {name}", weight)
        if "lora_rank" in settings and "lora" not in settings:
            for name, weight in handed_on(engine, base_sync_done=True):
                record.add(f"{number} adapters {name}", weight)
            both = {"base_sync_done": True, "layered_summon": True}
            for name, weight in handed_on(engine, **both):
                record.add(f"{number} adapters by layers {name}", weight)

    for number in range(2):
        step(number, number)
    if engine.optimizer is None:
        for name, weight in handed_on(engine):
            record.add(name, weight)
        return record.values
    saved = folder / "checkpoint"
    worker.save_checkpoint(str(saved), global_step=2)
    step(2, 2)
    # Back to what was saved.
    worker.load_checkpoint(str(saved))
    step(3, 2)
    record.add("checkpoint", torch.tensor(_bytes(saved)))
    return record.values


def _bytes(folder: Path) -> list[int]:
    """Of each file."""
    dist.barrier()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.stat().st_size for path in files]


@pytest.fixture(scope="module")
def workers() -> Iterator[RankPool]:
    """Theirs alone: no other test meets what stands in for Ray."""
    with RankPool(2) as pool:
        yield pool


QUICK = ("offload-policy", "adapters")
SLOW = pytest.mark.slow("frameworks")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else SLOW) for c in CASES]
)
def test_a_worker_equals_fsdp2s(workers, tmp_path, case):
    records = {}
    for system in ("fsdp2", "lowtide"):
        folder = tmp_path / system
        folder.mkdir()
        records[system] = workers.run(run_worker, system, CASES[case], folder)
    for mine, other in zip(records["lowtide"], records["fsdp2"], strict=True):
        assert_same_records(mine, other)
        assert len(other) > 2
        assert all(math.isfinite(v.double().sum()) for _, v in other if v is not None)


def unedited(folder: Path, strategy: str) -> str:
    verl_on_cpus.prepare()
    worker = make_worker(
        folder, strategy=strategy, external_lib="lowtide.integrations.verl"
    )
    return type(worker.engine.module).__mro__[1].__module__


@SLOW
def test_what_the_configuration_names_shards_with_lowtide(tmp_path):
    """It stays bound in these processes."""
    with RankPool(2) as pool:
        modules = pool.run(unedited, tmp_path, "fsdp2")
        assert modules == ["lowtide._sharding.fsdp_module"] * 2
        for outcome in pool.outcomes(unedited, tmp_path, "fsdp"):
            assert outcome.error_type == "NotImplementedError"
            assert "around Qwen2ForCausalLM. Ask the framework" in outcome.error
            assert "; verl: strategy fsdp2)" in outcome.error
