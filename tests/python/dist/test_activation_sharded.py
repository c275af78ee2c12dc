"""Checkpointed blocks that are sharded, by lowtide or FSDP2, wrapped in either order:
the same bits as without, and no collective more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import lowtide
from lowtide import ActivationPolicy
from lowtide._base.memory import ledger
from support.bits import same_bits
from support.model import Llama, ModelConfig, batch, build, loss_fn
from support.systems import get_system
from support.training import Run, adamw, local_params, shard

CONFIG = ModelConfig(num_layers=3, dropout=0.1)
RESIDUAL_BYTES = CONFIG.batch * CONFIG.seq * CONFIG.dim * 2  # bf16
NUM_STEPS = 3

POLICIES = {
    "recompute": ActivationPolicy(),
    "offload input": ActivationPolicy(offload=["input"]),
    "offload input, save w1": ActivationPolicy(
        offload=["input"], save=["layers.*.w1"], prefetch=0
    ),
    "offload both": ActivationPolicy(offload=["input", "layers.*.wo"]),
}


def checkpoint_blocks(model: Llama, policy: ActivationPolicy) -> None:
    for layer in model.layers:
        lowtide.checkpoint(layer, policy)


def wrap(model: Llama, system: str, order: str, policy: str | None, run: Run) -> None:
    if policy is not None and order == "checkpoint first":
        checkpoint_blocks(model, POLICIES[policy])
    shard(model, run, get_system(system))
    if policy is not None and order == "shard first":
        checkpoint_blocks(model, POLICIES[policy])


def train(
    system: str,
    order: str,
    policy: str | None,
    dtype: torch.dtype | None,
    autocast: bool,
) -> dict[str, Any]:
    run = Run(CONFIG, param_dtype=dtype)
    model = build(run.model)
    wrap(model, system, order, policy, run)
    optimizer = adamw(model, foreach=False)
    losses, gathers = [], []
    torch.manual_seed(dist.get_rank())
    for step in range(NUM_STEPS):
        ids, targets = batch(run.model, step, 0, dist.get_rank())
        with CommDebugMode() as comm:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_fn(model(ids), targets)
            loss.backward()
        gathers.append(collectives(comm, model, system))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = lowtide.memory_report(model) if policy else None
    return {
        "losses": losses,
        "params": local_params(model),
        "collectives": gathers[-1],
        "activations": report and report.to_dict()["activations"],
    }


def collectives(comm: CommDebugMode, model: Any, system: str) -> dict[str, int]:
    if system == "fsdp2":
        return {str(op): count for op, count in comm.get_comm_counts().items()}
    counts: dict[str, int] = {}
    for module in model.modules():
        state = lowtide._sharding.unit.unit_state(module)
        if state is None:
            continue
        for group in {state.groups.gather, state.groups.reduce}:
            for kind, (calls, _) in group.counters.items():
                counts[kind] = counts.get(kind, 0) + calls
            group.reset_counters()
    return counts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ["checkpoint first", "shard first"])
@pytest.mark.parametrize("system", ["lowtide", "fsdp2"])
def test_same_bits_and_collectives(
    system: str, order: str, policy: str, pool_of: Callable[[int], Any]
) -> None:
    pool = pool_of(2)
    dtype = torch.bfloat16
    plain = pool.run(train, system, order, None, dtype, False)
    ours = pool.run(train, system, order, policy, dtype, False)
    for mine, other in zip(ours, plain, strict=True):
        assert mine["losses"] == other["losses"]
        for name, value in mine["params"].items():
            assert same_bits(value, other["params"][name]), name
        assert sum(mine["collectives"].values()) > 0
        assert mine["collectives"] == other["collectives"]
        names = mine["activations"]["names"]
        if "input" in names:
            moved = NUM_STEPS * CONFIG.num_layers * RESIDUAL_BYTES
            assert names["input"]["moved_bytes"] == moved
            assert names["input"]["host_live"] == 0


def test_same_bits_under_autocast(pool_of: Callable[[int], Any]) -> None:
    pool = pool_of(2)
    args = ("lowtide", "shard first")
    plain = pool.run(train, *args, None, None, True)
    ours = pool.run(train, *args, "offload both", None, True)
    for mine, other in zip(ours, plain, strict=True):
        assert mine["losses"] == other["losses"]
        for name, value in mine["params"].items():
            assert same_bits(value, other["params"][name]), name


def recompute_states() -> dict[str, list[str]]:
    """Each block's unit: states seen while it is computed again, and at the end."""
    run = Run(CONFIG)
    model = build(run.model)
    shard(model, run, get_system("lowtide"))
    checkpoint_blocks(model, ActivationPolicy(offload=["input"]))
    seen: dict[str, list[str]] = {"recompute": [], "weights": [], "after": []}

    def watch(layer: Any) -> None:
        unit = layer._get_fsdp_state().unit

        def hook(module: Any, args: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                seen["recompute"].append(unit.state)

        # Runs after the unit's own, which gathers.
        layer.register_forward_pre_hook(hook)
        layer.attention_norm.register_full_backward_pre_hook(
            lambda *_: seen["weights"].append(unit.state)
        )

    for layer in model.layers:
        watch(layer)
    ids, targets = batch(run.model, 0, 0, dist.get_rank())
    loss_fn(model(ids), targets).backward()
    seen["after"] = [layer._get_fsdp_state().unit.state for layer in model.layers]
    return seen


def test_parameters_gathered_for_the_recomputation_stay_for_its_backward(
    pool_of: Callable[[int], Any],
) -> None:
    for seen in pool_of(2).run(recompute_states):
        assert seen["recompute"] == ["unsharded"] * 3
        assert seen["weights"] == ["unsharded"] * 3
        assert seen["after"] == ["sharded"] * 3


def peak_gathered(policy: ActivationPolicy | None) -> int:
    run = Run(CONFIG)
    model = build(run.model)
    shard(model, run, get_system("lowtide"))
    if policy is not None:
        checkpoint_blocks(model, policy)
    book = ledger(torch.device("cpu"))
    for step in range(2):
        book.reset_peaks()
        ids, targets = batch(run.model, step, 0, dist.get_rank())
        loss_fn(model(ids), targets).backward()
    return book.peak()["gathered"]


def test_no_more_parameters_are_gathered_at_once(pool_of: Callable[[int], Any]) -> None:
    pool = pool_of(2)
    plain = pool.run(peak_gathered, None)
    assert plain[0] > 0
    assert pool.run(peak_gathered, ActivationPolicy(offload=["input"])) == plain


class Bomb(Exception):
    pass


def fail_then_train(bomb_at: int | None) -> list[float]:
    run = Run(CONFIG)
    model = build(run.model)
    shard(model, run, get_system("lowtide"))
    checkpoint_blocks(model, ActivationPolicy(offload=["input"]))
    optimizer = adamw(model, foreach=False)
    calls = 0

    def explode(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == bomb_at:
            raise Bomb

    model.layers[1].wo.register_forward_hook(explode)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        ids, targets = batch(run.model, step, 0, dist.get_rank())
        try:
            loss = loss_fn(model(ids), targets)
            loss.backward()
        except Bomb:
            continue
        if bomb_at is None and step == 0:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bomb_at", [1, 2], ids=["forward", "recomputation"])
def test_training_goes_on_after_an_exception(
    bomb_at: int, pool_of: Callable[[int], Any]
) -> None:
    pool = pool_of(2)
    failed = pool.run(fail_then_train, bomb_at)
    skipped = pool.run(fail_then_train, None)
    assert failed == skipped
