"""verl's worker over the driver that computes nothing: what gloo's ranks do not have.
Parameters and states that its engine moves to the host between two uses, activations
that it keeps there, and page-locked memory."""

from __future__ import annotations

import gc
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.integrations import bind
from lowtide.phantom.dry import launch
from support import verl_on_cpus
from support.dry_process import call_dry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # ten workers of either system, in two processes
    pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch"),
    pytest.mark.skipif(not verl_on_cpus.is_here(), reason=verl_on_cpus.MISSING),
]
MOVED = {"param_offload": True, "optimizer_offload": True}
MERGED = {"lora_rank": 4, "lora": {"merge": True}}
SETTINGS: dict[str, dict[str, Any]] = {
    "moved": MOVED,
    "adapters moved": MOVED | {"lora_rank": 4},
    "merged moved": MOVED | MERGED,
    "on the host": {"offload_policy": True},
    "adapters on the host": {"offload_policy": True, "lora_rank": 4},
    "merged on the host": {"offload_policy": True} | MERGED,
    "reference": {"forward_only": True},
    "activations": {"enable_activation_offload": True},
    "scaled": {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32"}},
    "experts": MOVED | {"experts": 4},
}
Held = dict[str, list[tuple[str, str, int]]]


def held(system: str, folder: Path) -> Held:
    """After each use of the worker where its parameters are, and the bytes that are
    allocated on the device."""
    verl_on_cpus.stand_in_for_absent()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    if system == "lowtide":
        bind()
    return {
        name: _held(folder / name, **settings) for name, settings in SETTINGS.items()
    }


def _held(folder: Path, **settings: Any) -> list[tuple[str, str, int]]:
    from support.verl_workers import make_worker, samples

    gc.collect()
    before = torch.cuda.memory_allocated()
    worker = make_worker(folder / "model", **settings)
    points = []

    def note(what: str) -> None:
        device = next(worker.engine.module.parameters()).device.type
        points.append((what, device, torch.cuda.memory_allocated() - before))

    def hand_on(**how: Any) -> None:
        for _ in worker.engine.get_per_tensor_param(**how)[0]:
            pass
        note(f"handed on {how}")

    note("made")
    for seed in range(2):
        worker.infer_batch(samples(seed))
        note("inferred")
        if worker.engine.optimizer is None:
            continue
        worker.train_batch(samples(seed))
        note("trained")
        hand_on()
        if "lora_rank" in settings and "lora" not in settings:
            hand_on(base_sync_done=True)
            hand_on(base_sync_done=True, layered_summon=True)
        if "offload_policy" not in settings:
            worker.to("cpu")
            note("left")
            worker.to("device")
            note("back")
    if worker.engine.optimizer is not None:
        worker.save_checkpoint(str(folder / "checkpoint"), global_step=2)
        worker.load_checkpoint(str(folder / "checkpoint"))
        worker.train_batch(samples(3))
        note("resumed")
    return points


LENT: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"lora_rank": 4},
    "experts": {"experts": 4},
    "moved": MOVED,
}


def lent(folder: Path) -> dict[str, dict[str, list[int]]]:
    """By moment the bytes that are allocated for each worker, twice; of its shards."""
    verl_on_cpus.stand_in_for_absent()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    bind()
    return {name: _lent(folder / name, **settings) for name, settings in LENT.items()}


def _lent(folder: Path, **settings: Any) -> dict[str, list[int]]:
    from support.verl_workers import make_worker, samples

    gc.collect()
    before = torch.cuda.memory_allocated()
    worker = make_worker(folder / "model", **settings)
    module, optimizer = worker.engine.module, worker.engine.optimizer
    found: dict[str, list[int]] = {}

    def note(what: str) -> None:
        gc.collect()
        found.setdefault(what, []).append(torch.cuda.memory_allocated() - before)

    for seed in range(2):
        worker.train_batch(samples(seed))
        note("trained")
        lowtide.sleep(module, optimizer)
        note("asleep")
        lowtide.wake(module, parts=["parameters"])
        deque(worker.engine.get_per_tensor_param()[0], maxlen=0)
        note("handed on")
        lowtide.wake(module, optimizer)
        note("awake")
    found["shards"] = [sum(p.to_local().nbytes for p in module.parameters())]
    return found


def test_a_worker_that_sleeps_holds_nothing(tmp_path):
    machine = launch.Machine(world=2)
    for name, found in call_dry(lent, tmp_path, machine=machine).items():
        assert max(found["asleep"]) <= 512, (name, found)
        assert found["awake"] == 2 * found["trained"][1:], (name, found)
        moved = name == "moved"  # by verl, before it sleeps
        gone = found["trained"][0] - found["asleep"][0]
        assert gone == 0 if moved else gone > found["shards"][0], (name, found)


def test_a_worker_holds_what_it_holds_with_fsdp2(tmp_path):
    theirs, ours = (
        call_dry(held, system, tmp_path / system, machine=launch.Machine(world=2))
        for system in ("fsdp2", "lowtide")
    )
    for name, points in theirs.items():
        assert [(what, where) for what, where, _ in ours[name]] == [
            (what, where) for what, where, _ in points
        ]
        for mine, other in zip(ours[name], points, strict=True):
            assert mine[2] <= other[2], (name, mine, other)
        stays = SETTINGS[name].keys().isdisjoint({"offload_policy", "forward_only"})
        assert not stays or ("back", "cuda") in {point[:2] for point in points}
