"""Time of a training step of a small model on CPUs, lowtide beside FSDP2."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch.distributed as dist
from case import Case, Row, rows_of

from support.model import ModelConfig, batch, build, loss_fn
from support.ranks import RankPool
from support.systems import get_system
from support.training import Run, adamw, shard

NAME = "step_cpu"
WORLD_SIZE = 2
MODEL = ModelConfig(
    dim=128,
    num_layers=8,
    vocab=256,
    num_heads=4,
    num_kv_heads=2,
    kv_dim=64,
    ffn=344,
    seq=128,
    batch=1,
)
WARM_UP = 3
NUM_STEPS = 30
SYSTEMS = ("lowtide", "fsdp2")
CLOCKS = {"seconds": "step time", "cpu_seconds": "CPU time of a step"}


def record(run: Run, num_steps: int) -> dict[str, Any]:
    """On every rank: seconds a step, the systems in turns."""
    models = {name: shard(build(run.model), run, get_system(name)) for name in SYSTEMS}
    optimizers = {name: adamw(model, foreach=True) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    losses: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for step in range(WARM_UP + num_steps):
        inputs, targets = batch(run.model, step, 0, dist.get_rank())
        # Who goes first changes from step to step.
        for name in SYSTEMS if step % 2 == 0 else SYSTEMS[::-1]:
            dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            loss = loss_fn(models[name](inputs), targets)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
                cpu_seconds[name].append(time.process_time() - cpu_begin)
            losses[name].append(loss.item())
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses}


def measure() -> list[Row]:
    run = Run(MODEL, world_size=WORLD_SIZE, param_dtype=None, reduce_dtype=None)
    with RankPool(WORLD_SIZE) as pool:
        ranks = pool.run(record, run, NUM_STEPS, timeout=600)
    return rows(ranks)


def rows(ranks: list[dict[str, Any]]) -> list[Row]:
    row = rows_of(NAME)
    result = []
    for clock, quantity in CLOCKS.items():
        # A step takes as long as its slowest rank.
        steps = {
            name: [max(s) for s in zip(*(r[clock][name] for r in ranks), strict=True)]
            for name in SYSTEMS
        }
        for name, values in steps.items():
            median = round(1e3 * statistics.median(values), 2)
            result.append(row(name, f"{quantity}, median", median, "ms", "measured"))
        ratios = [a / b for a, b in zip(steps["lowtide"], steps["fsdp2"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        note = f"half of the steps lie between {low:.2f} and {high:.2f}"
        quantity = f"{quantity} beside FSDP2's, median of ratios"
        value = round(middle, 3)
        result.append(row("lowtide", quantity, value, "", "measured", note))
    equal = all(r["losses"]["lowtide"] == r["losses"]["fsdp2"] for r in ranks)
    result.append(row("lowtide", "all losses equal FSDP2's", equal, "", "measured"))
    return result


CASE = Case(
    name=NAME,
    describe="Time of a training step on CPUs, beside FSDP2.",
    how="""\
Two gloo ranks, one thread each, on two cores; 8 blocks of width 128, 128 tokens, fp32,
AdamW. The systems take turns step by step in the same processes; a step counts as long
as its slower rank. CPU time is that of a rank's process, all threads. Median of 30.
Shared machine: the ratio is the figure.""",
    run=measure,
)
