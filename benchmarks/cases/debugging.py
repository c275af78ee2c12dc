"""What a training step costs with LOWTIDE_DEBUG=1, and with LOWTIDE_DEBUG_LOG."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case import Case, Row, rows_of

import lowtide
from cases.step_cpu import MODEL, WARM_UP, WORLD_SIZE
from lowtide._base.memory import ledger
from support.model import batch, build, loss_fn
from support.ranks import RankPool
from support.training import adamw

NAME = "debugging"
NUM_STEPS, ROUNDS = 10, 3
LOG = "LOWTIDE_DEBUG_LOG"
SYSTEMS: dict[str, dict[str, str]] = {
    "without": {},
    "LOWTIDE_DEBUG=1": {"LOWTIDE_DEBUG": "1"},
    LOG: {LOG: ""},  # a folder
}


def record(num_steps: int) -> dict[str, Any]:
    """On every rank of a new process."""
    torch.set_num_threads(1)
    model: Any = build(MODEL)
    for layer in model.layers:
        lowtide.checkpoint(layer, lowtide.ActivationPolicy(offload=["input"]))
        lowtide.fully_shard(layer)
    lowtide.fully_shard(model)
    optimizer = adamw(model, foreach=True)
    clocks: list[float] = []
    losses: list[float] = []
    for step in range(WARM_UP + num_steps):
        inputs, targets = batch(MODEL, step, 0, dist.get_rank())
        dist.barrier()
        begin = time.process_time()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_UP:
            clocks.append(time.process_time() - begin)
        losses.append(loss.item())
    folder = os.environ.get(LOG)
    log = Path(folder, f"rank-{dist.get_rank()}.txt") if folder else None
    return {
        "cpu_seconds": clocks,
        "losses": losses,
        "leased": sum(ledger(torch.device("cpu")).peak().values()),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "log": log.stat().st_size / len(losses) if log else 0,
    }


def measure(num_steps: int = NUM_STEPS, rounds: int = ROUNDS) -> list[Row]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for _ in range(rounds):
        for name, variables in SYSTEMS.items():
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                given = {key: value or folder for key, value in variables.items()}
                pool = stack.enter_context(RankPool(WORLD_SIZE, env=given))
                found[name] += pool.run(record, num_steps, timeout=600)
    return rows(found)


def rows(found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    row = rows_of(NAME)
    result = []
    medians = {
        name: statistics.median(s for one in ranks for s in one["cpu_seconds"])
        for name, ranks in found.items()
    }
    for name, ranks in found.items():
        unit, kind = "MiB", "measured"
        result += [
            row(name, "CPU time of a step", round(1e3 * medians[name], 1), "ms", kind),
            row(
                name,
                "beside a step without",
                round(medians[name] / medians["without"], 2),
                "",
                kind,
            ),
            row(
                name,
                "peak of leased bytes",
                round(max(one["leased"] for one in ranks) / 2**20, 2),
                unit,
                kind,
            ),
            row(
                name,
                "peak of resident memory",
                round(statistics.median(one["resident"] for one in ranks) / 2**20),
                unit,
                kind,
            ),
            row(
                name,
                "bytes of the log a step",
                round(max(one["log"] for one in ranks)),
                "B",
                kind,
            ),
        ]
    all_losses = [one["losses"] for ranks in found.values() for one in ranks]
    equal = all(losses in all_losses[:WORLD_SIZE] for losses in all_losses)
    for name in SYSTEMS:
        result.append(row(name, "losses are those without", equal, "", "measured"))
    return result


CASE = Case(
    name=NAME,
    describe="What a step costs with LOWTIDE_DEBUG=1 and with LOWTIDE_DEBUG_LOG.",
    how=f"""\
The model of step_cpu on two gloo ranks of one thread each, every block checkpointed
with its input offloaded. Processes with and without a variable run in turns, {ROUNDS}
times {NUM_STEPS} steps; CPU time is that of a rank's process, all threads; median. The
phantom has no values to compare and refuses both variables.""",
    run=measure,
)
