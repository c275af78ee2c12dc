"""verl's worker of an FSDP2 engine, unedited, between two generations: log
probabilities, minibatches of microbatches, weights handed to the rollouts, its
checkpoints; the bits of FSDP2."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.integrations import bind
from support import verl_on_cpus
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records
from support.training import local
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


def lend(engine: Any) -> None:
    """To an engine of inference, which is given the weights before the rest wakes."""
    module, optimizer = engine.module, engine.optimizer
    states = [local(t) for state in optimizer.state.values() for t in state.values()]
    held = [local(p) for p in module.parameters()] + states
    assert len(states) > 0
    lowtide.sleep(module, optimizer)
    for tensor in held:
        with pytest.raises(RuntimeError, match="expected one that is awake, got"):
            tensor.clone()
    lowtide.wake(module, parts=["parameters"])
    for _ in handed_on(engine):
        pass
    lowtide.wake(module, optimizer)


def run_worker(
    system: str, settings: dict[str, Any], folder: Path, lends: bool = False
) -> Record:
    verl_on_cpus.prepare()
    if system == "lowtide":
        with bind():
            return _run_worker(settings, folder, lends)
    return _run_worker(settings, folder, lends)


def _run_worker(settings: dict[str, Any], folder: Path, lends: bool) -> Record:
    from verl.utils import tensordict_utils

    # Its state, of a size of its own, is in the checkpoint; a process draws once of it.
    random.seed(0)
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
            if lends:
                lend(engine)
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


@pytest.fixture(scope="module")
def with_fsdp2(
    workers: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Record]]:
    """What its worker did, run once."""

    @functools.cache
    def records(case: str) -> list[Record]:
        folder = tmp_path_factory.mktemp("fsdp2")
        return workers.run(run_worker, "fsdp2", CASES[case], folder)

    return records


SLOW = pytest.mark.slow("frameworks")


def cases(quick: Sequence[str], leave_out: Sequence[str] = ()) -> list[Any]:
    return [
        pytest.param(case, marks=[] if case in quick else SLOW)
        for case in CASES
        if case not in leave_out
    ]


@pytest.mark.parametrize("case", cases(("offload-policy", "adapters")))
def test_a_worker_equals_fsdp2s(workers, with_fsdp2, tmp_path, case):
    ours = workers.run(run_worker, "lowtide", CASES[case], tmp_path)
    for mine, other in zip(ours, with_fsdp2(case), strict=True):
        assert_same_records(mine, other)
        assert len(other) > 2
        assert all(math.isfinite(v.double().sum()) for _, v in other if v is not None)


# A reference has no steps; with the policy nothing is on the device between two.
@pytest.mark.parametrize("case", cases(("adapters",), ("reference", "offload-policy")))
def test_a_worker_sleeps_between_two_steps(workers, with_fsdp2, tmp_path, case):
    ours = workers.run(run_worker, "lowtide", CASES[case], tmp_path, lends=True)
    for mine, other in zip(ours, with_fsdp2(case), strict=True):
        assert_same_records(mine, other)


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
